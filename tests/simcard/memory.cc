// Device memory: an arena for each card, mapped twice. Paddle gets addresses in the mapping without access rights, as
// the host cannot touch a card's memory; the streams work through the other mapping.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "card.h"

namespace sim {
namespace {

constexpr size_t kChunk = 256;  // alignment of an allocation
constexpr int kNotANumber = 0xFF;  // in every byte: what nobody wrote is NaN in float16, bfloat16, float32 and float64

class Arena {
 public:
  void Open(size_t bytes) {
    size_ = bytes;
    int file = memfd_create("simcard", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, size_)) Give("memfd_create");
    host_ = Map(file, PROT_READ | PROT_WRITE);
    device_ = Map(file, PROT_NONE);
    close(file);
    free_[0] = size_;
  }

  void* Take(size_t bytes) {
    bytes = (std::max<size_t>(bytes, 1) + kChunk - 1) / kChunk * kChunk;
    std::lock_guard<std::mutex> held(lock_);
    auto fits = std::find_if(free_.begin(), free_.end(), [&](auto& gap) { return gap.second >= bytes; });
    if (fits == free_.end()) return nullptr;
    auto [at, length] = *fits;
    free_.erase(fits);
    if (length > bytes) free_[at + bytes] = length - bytes;
    taken_[at] = bytes;
    used_ += bytes;
    std::memset(host_ + at, kNotANumber, bytes);
    return device_ + at;
  }

  bool Return(void* pointer) {
    std::lock_guard<std::mutex> held(lock_);
    auto found = taken_.find(static_cast<char*>(pointer) - device_);
    if (found == taken_.end()) return false;
    auto [at, bytes] = *found;
    taken_.erase(found);
    used_ -= bytes;
    std::memset(host_ + at, kNotANumber, bytes);
    auto next = free_.lower_bound(at);
    if (next != free_.end() && at + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == at)
      std::prev(next)->second += bytes;
    else
      free_[at] = bytes;
    return true;
  }

  bool Holds(const void* pointer) const { return pointer >= device_ && pointer < device_ + size_; }
  char* Host(const void* pointer) const { return host_ + (static_cast<const char*>(pointer) - device_); }
  size_t size() const { return size_; }
  size_t used() const { return used_; }

 private:
  char* Map(int file, int rights) {
    void* place = mmap(nullptr, size_, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (place == MAP_FAILED) Give("mmap");
    return static_cast<char*>(place);
  }
  [[noreturn]] static void Give(const char* call) {
    std::perror((std::string("simcard: ") + call).c_str());
    std::abort();
  }

  char *device_ = nullptr, *host_ = nullptr;
  size_t size_ = 0, used_ = 0;
  std::map<size_t, size_t> free_, taken_;  // offset -> length
  std::mutex lock_;
};

Arena g_arenas[kMostCards];
std::mutex g_pinned_lock;
std::map<const char*, size_t> g_pinned;

const Arena* ArenaOf(const void* pointer) {
  for (size_t card = 0; card < settings().cards; ++card)
    if (g_arenas[card].Holds(pointer)) return &g_arenas[card];
  return nullptr;
}

// Out of memory is a null pointer, not a status: only then Paddle's allocator frees what it keeps and tries again, and
// raises what it raises for CUDA.
C_Status Allocate(const C_Device card, void** pointer, size_t size) {
  if (Failed(card->id)) return C_ERROR;
  *pointer = g_arenas[card->id].Take(size);
  Count(kAllocations);
  Trace("allocate", R"("card":%d,"bytes":%zu,"done":%s,"used":%zu)", card->id, size, *pointer ? "true" : "false",
        g_arenas[card->id].used());
  return C_SUCCESS;
}

C_Status Deallocate(const C_Device card, void* pointer, size_t size) {
  if (Failed(card->id)) return C_SUCCESS;  // from destructors, which must not throw
  DrainCard(card->id);                     // as cudaFree does
  Trace("free", R"("card":%d,"bytes":%zu)", card->id, size);
  return g_arenas[card->id].Return(pointer) ? C_SUCCESS : C_ERROR;
}

C_Status AllocatePinned(const C_Device, void** pointer, size_t size) {
  *pointer = std::malloc(std::max<size_t>(size, 1));
  if (!*pointer) return C_FAILED;
  std::lock_guard<std::mutex> held(g_pinned_lock);
  g_pinned[static_cast<char*>(*pointer)] = size;
  return C_SUCCESS;
}

C_Status DeallocatePinned(const C_Device, void* pointer, size_t) {
  {
    std::lock_guard<std::mutex> held(g_pinned_lock);
    g_pinned.erase(static_cast<char*>(pointer));
  }
  std::free(pointer);
  return C_SUCCESS;
}

C_Status Statistics(const C_Device card, size_t* total, size_t* free) {
  *total = g_arenas[card->id].size();
  *free = *total - g_arenas[card->id].used();
  return C_SUCCESS;
}

C_Status ChunkSize(const C_Device, size_t* size) {
  *size = kChunk;
  return C_SUCCESS;
}

}  // namespace

void OpenMemory() {
  for (size_t card = 0; card < settings().cards; ++card) g_arenas[card].Open(settings().memory);
}

void* Reach(const void* pointer) {
  const Arena* arena = ArenaOf(pointer);
  return arena ? arena->Host(pointer) : const_cast<void*>(pointer);
}

bool OnCard(const void* pointer) { return ArenaOf(pointer) != nullptr; }

bool Pinned(const void* pointer) {
  if (settings().all_pinned) return true;
  std::lock_guard<std::mutex> held(g_pinned_lock);
  auto* at = static_cast<const char*>(pointer);
  auto next = g_pinned.upper_bound(at);
  return next != g_pinned.begin() && at < std::prev(next)->first + std::prev(next)->second;
}

int& CurrentCard() {
  thread_local int card = 0;
  return card;
}

void FillMemory(C_DeviceInterface* table) {
  table->device_memory_allocate = Allocate;
  table->device_memory_deallocate = Deallocate;
  table->host_memory_allocate = AllocatePinned;
  table->host_memory_deallocate = DeallocatePinned;
  table->device_memory_stats = Statistics;
  table->device_min_chunk_size = ChunkSize;
}

}  // namespace sim
