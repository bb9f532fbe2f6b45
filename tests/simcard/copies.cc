// Copies, with CUDA's rules for who waits: page-locked host memory is copied in the background, pageable memory while
// the host waits.
#include <dlfcn.h>
#include <execinfo.h>

#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "card.h"

namespace sim {
namespace {

// The name of the function that a frame of the call stack is in, or "". Looking one up takes a fifth of a millisecond.
const std::string& FunctionOf(void* frame) {
  static std::mutex lock;
  static std::unordered_map<void*, std::string> known;
  std::lock_guard<std::mutex> held(lock);
  auto found = known.find(frame);
  if (found == known.end()) {
    Dl_info info;
    const char* name = dladdr(frame, &info) && info.dli_sname ? info.dli_sname : "";
    found = known.emplace(frame, name).first;
  }
  return found->second;
}

// Whether Paddle copies because the card lacks a kernel: it reads the inputs back and computes on the CPU. Paddle tells
// the plugin nothing about it, but the call stack does.
bool ForFallback(const char* direction) {
  const char* caller = std::strcmp(direction, "d2h") == 0 ? "TransDataPlace" : "TransDataBackend";
  void* frames[40];
  int depth = backtrace(frames, 40);
  for (int i = 0; i < depth; ++i) {
    if (FunctionOf(frames[i]).find(caller) != std::string::npos) return true;
  }
  return false;
}

void Note(const char* direction, size_t bytes, bool blocking) {
  bool fallback = false;
  if (std::strcmp(direction, "d2d") == 0) {
    Count(kD2D);
  } else {
    fallback = ForFallback(direction);
    bool up = direction[0] == 'h';
    Count(up ? kH2D : kD2H);
    Count(up ? kH2DBytes : kD2HBytes, bytes);
    if (fallback) Count(kFallbackCopies);
  }
  if (blocking) Count(kBlockingCopies);
  Trace("copy", R"("direction":"%s","bytes":%zu,"blocking":%s,"fallback":%s)", direction, bytes,
        blocking ? "true" : "false", fallback ? "true" : "false");
}

// As cudaMemcpy: waits for everything that the card has to do before.
C_Status Now(const char* direction, int card, void* to, const void* from, size_t size) {
  if (Failed(card)) return C_ERROR;
  Note(direction, size, true);
  BlockedOn(direction, [&] { DrainCard(card); });
  if (Failed(card)) return C_ERROR;
  std::memmove(Reach(to), Reach(from), size);
  return C_SUCCESS;
}

C_Status Later(const char* direction, int card, C_Stream stream, void* to, const void* from, size_t size, bool blocking) {
  if (!stream) return Now(direction, card, to, from, size);
  if (Failed(card)) return C_ERROR;
  Note(direction, size, blocking);
  Task task;
  task.run = [=] { std::memmove(Reach(to), Reach(from), size); };
  task.delay_us = settings().copy_delay_us;
  Enqueue(stream, std::move(task));
  if (blocking) BlockedOn(direction, [&] { Drain(stream); });
  return Failed(card) ? C_ERROR : C_SUCCESS;
}

C_Status H2D(const C_Device card, void* to, const void* from, size_t size) { return Now("h2d", card->id, to, from, size); }
C_Status D2H(const C_Device card, void* to, const void* from, size_t size) { return Now("d2h", card->id, to, from, size); }
C_Status D2D(const C_Device card, void* to, const void* from, size_t size) { return Now("d2d", card->id, to, from, size); }

C_Status P2P(const C_Device, const C_Device from_card, void* to, const void* from, size_t size) {
  return Now("d2d", from_card->id, to, from, size);
}

C_Status AsyncH2D(const C_Device card, C_Stream stream, void* to, const void* from, size_t size) {
  return Later("h2d", card->id, stream, to, from, size, !Pinned(from));
}

C_Status AsyncD2H(const C_Device card, C_Stream stream, void* to, const void* from, size_t size) {
  return Later("d2h", card->id, stream, to, from, size, !Pinned(to));
}

C_Status AsyncD2D(const C_Device card, C_Stream stream, void* to, const void* from, size_t size) {
  return Later("d2d", card->id, stream, to, from, size, false);
}

C_Status AsyncP2P(const C_Device, const C_Device from_card, C_Stream stream, void* to, const void* from, size_t size) {
  return Later("d2d", from_card->id, stream, to, from, size, false);
}

C_Status Set(const C_Device card, void* pointer, unsigned char value, size_t size) {
  if (Failed(card->id)) return C_ERROR;
  BlockedOn("memset", [&] { DrainCard(card->id); });
  std::memset(Reach(pointer), value, size);
  return C_SUCCESS;
}

}  // namespace

void FillCopies(C_DeviceInterface* table) {
  table->memory_copy_h2d = H2D;
  table->memory_copy_d2h = D2H;
  table->memory_copy_d2d = D2D;
  table->memory_copy_p2p = P2P;
  table->async_memory_copy_h2d = AsyncH2D;
  table->async_memory_copy_d2h = AsyncD2H;
  table->async_memory_copy_d2d = AsyncD2D;
  table->async_memory_copy_p2p = AsyncP2P;
  table->device_memory_set = Set;
}

}  // namespace sim
