// Counters of what the host asked of the card, and a trace of it. Both are for tests.
#include <fcntl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "card.h"

namespace sim {
namespace {

std::array<std::atomic<uint64_t>, kCounters> g_counters{};

int File() {
  static const int file =
      settings().trace.empty() ? -1
                               : open(settings().trace.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  return file;
}

double Now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

}  // namespace

void Count(Counter counter, uint64_t by) {
  if (counter != kCounters) g_counters[counter] += by;
}

bool Tracing() { return File() >= 0; }

void Trace(const char* event, const char* format, ...) {
  if (!Tracing()) return;
  char line[512];
  constexpr int most = sizeof line - 3;  // leaves room for the end of the line
  int n = std::snprintf(line, most, R"({"time":%.6f,"thread":%ld,"event":"%s",)", Now(), syscall(SYS_gettid), event);
  va_list values;
  va_start(values, format);
  n += std::vsnprintf(line + n, most - n, format, values);
  va_end(values);
  if (n >= most) n = most - 1;
  line[n++] = '}';
  line[n++] = '\n';
  (void)!write(File(), line, n);  // one write a line: threads do not mix
}

}  // namespace sim

// For ctypes; tests/simcard/counters.py has the names, in this order.
extern "C" size_t sim_counters(uint64_t* values, size_t most) {
  for (size_t i = 0; i < most && i < sim::kCounters; ++i) values[i] = sim::g_counters[i];
  return sim::kCounters;
}
extern "C" void sim_reset_counters() {
  for (auto& counter : sim::g_counters) counter = 0;
}
