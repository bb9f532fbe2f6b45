// What the parts of the simulated card share. Nothing here knows Paddle's tensors; see launch.h for those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace sim {

// ---- settings.cc: what the environment sets, read once.

struct Settings {
  size_t cards, memory;                // how many, and bytes of each
  size_t delay_us, collective_delay_us, copy_delay_us;
  bool local_sync_bn;                  // sync_batch_norm that forgets to synchronise
  bool all_pinned;                     // all memory of the host counts as page-locked
  int rank;
  std::string trace;                   // path, or empty
  std::vector<std::string> without;    // kernels and data types that the card lacks
};
const Settings& settings();
bool Lacks(const std::string& kernel_or_type);

// ---- trace.cc: counters, and one JSON object a line.

enum Counter {
  kKernels, kKernelsDone, kH2D, kD2H, kD2D, kH2DBytes, kD2HBytes, kBlockingWaits, kBlockingCopies, kFallbackCopies,
  kCollectives, kCollectivesDone, kAllocations, kCounters
};
void Count(Counter counter, uint64_t by = 1);
bool Tracing();
// Trace("copy", R"("direction":"h2d","bytes":%zu)", bytes): `format` makes the members of the object.
void Trace(const char* event, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- memory.cc: device memory, mapped twice.

constexpr size_t kMostCards = 8;
void OpenMemory();
void* Reach(const void* pointer);      // the address at which this process may touch what Paddle calls `pointer`
bool OnCard(const void* pointer);
bool Pinned(const void* pointer);      // page-locked host memory: copies of it do not block
int& CurrentCard();                    // of the calling thread

// ---- stream.cc: streams and events.

struct Task {
  std::string name;                    // of the kernel or the collective; empty for copies and events
  std::function<void()> run;
  size_t delay_us = 0;
  bool stalls = false, fails = false;  // what a rule of SIM_STALL or SIM_FAIL says
  double stall_seconds = 0;            // 0: for ever
  uint64_t number = 0;                 // of the launch
  Counter done = kCounters;            // what to count when it is done
};
C_Status Enqueue(C_Stream stream, Task task);
C_Status Drain(C_Stream stream);       // wait until the stream is idle
C_Status DrainCard(int card);
void BlockedOn(const char* what, const std::function<void()>& wait);  // counts and traces a wait of the host
bool OnComputeStream(C_Stream stream);
void MarkCompute(C_Stream stream);
int StreamNumber(C_Stream stream);

// ---- faults.cc: sticky errors, and the rules that cause them.

bool Failed(int card);                 // once true, every later call of that card fails, as in CUDA
void Fail(int card, const std::string& why);
std::string FailureOf(int card);
void ApplyRules(Task* task, bool collective, uint64_t collective_number, bool compute_stream);

// ---- collective.cc

void Progress();                       // what a thread does between two looks at another process
// Adds up values over all ranks when the stream comes to it; returns how many ranks there are.
using Values = std::shared_ptr<std::vector<float>>;
size_t SumOverRanks(C_Stream stream, const Values& values);

// ---- Each part fills in its functions of Paddle's table.

void FillMemory(C_DeviceInterface* table);
void FillCopies(C_DeviceInterface* table);
void FillStreams(C_DeviceInterface* table);
void FillCollectives(C_DeviceInterface* table);

// ---- operators*.cc: registers the kernels of the card.

void RegisterKernels();

}  // namespace sim
