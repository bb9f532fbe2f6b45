// How ranks find each other, and the order of what they do together.
#include "communicator.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

void C_CCLComm_st::Meet() {
  seat(rank).turn.store(++turn, std::memory_order_release);
  for (size_t other = 0; other < size; ++other)
    while (seat(other).turn.load(std::memory_order_acquire) < turn) sim::Progress();
}

namespace sim {
namespace {

constexpr size_t kIdBytes = 64;
C_CCLComm g_world = nullptr;

// Files of jobs that were killed before all ranks had come. Their names hold the process that made them.
void RemoveLeftovers() {
  DIR* directory = opendir("/dev/shm");
  if (!directory) return;
  while (dirent* entry = readdir(directory)) {
    int pid = 0;
    if (std::sscanf(entry->d_name, "simcard-%d-", &pid) == 1 && pid > 0 && kill(pid, 0) && errno == ESRCH)
      shm_unlink((std::string("/") + entry->d_name).c_str());
  }
  closedir(directory);
}

C_Status IdSize(size_t* size) {
  *size = kIdBytes;
  return C_SUCCESS;
}

C_Status MakeId(C_CCLRootId* id) {
  RemoveLeftovers();
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  std::memset(id->data, 0, id->sz);
  std::snprintf(static_cast<char*>(id->data), id->sz, "simcard-%d-%lld%09ld", getpid(), (long long)now.tv_sec, now.tv_nsec);
  return C_SUCCESS;
}

C_Status Join(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  if (ranks > kMostRanks) {
    std::fprintf(stderr, "simcard: %zu ranks, at most %zu are supported\n", ranks, kMostRanks);
    return C_ERROR;
  }
  std::string path = std::string("/") + static_cast<const char*>(id->data);
  int file = shm_open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, C_CCLComm_st::Bytes(ranks))) return C_FAILED;
  void* place = mmap(nullptr, C_CCLComm_st::Bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (place == MAP_FAILED) return C_FAILED;
  auto* made = new C_CCLComm_st;
  made->size = ranks, made->rank = rank, made->path = path, made->shared = static_cast<char*>(place);
  Trace("join", R"("rank":%zu,"ranks":%zu)", rank, ranks);
  made->Meet();  // as ncclCommInitRank does
  if (rank == 0) shm_unlink(path.c_str());
  Trace("joined", R"("rank":%zu,"ranks":%zu)", rank, ranks);
  const char* world = std::getenv("PADDLE_TRAINERS_NUM");
  if (!g_world && world && std::strtoull(world, nullptr, 10) == ranks) g_world = made;
  *comm = made;
  return C_SUCCESS;
}

C_Status Leave(C_CCLComm) { return C_SUCCESS; }  // leaked: a stream may hang in it

#if SIM_PADDLE_MAJOR >= 3
C_Status Name(C_CCLComm comm, char* name) {
  std::strncpy(name, comm->path.c_str(), 127);
  return C_SUCCESS;
}
#endif

}  // namespace

C_CCLComm World() { return g_world; }

C_Status LaunchCollective(const char* name, size_t bytes, C_CCLComm comm, C_Stream stream, std::function<void()> run) {
  static std::atomic<uint64_t> launched{0};
  if (Failed(CurrentCard())) return C_ERROR;
  Task task;
  task.name = name;
  task.number = ++launched;
  task.delay_us = settings().collective_delay_us;
  task.done = kCollectivesDone;
  uint64_t ticket = comm->launched++;
  task.run = [=] {
    while (comm->finished != ticket) Progress();
    run();
    ++comm->finished;
  };
  ApplyRules(&task, true, task.number, OnComputeStream(stream));
  Count(kCollectives);
  Trace("collective", R"("name":"%s","number":%zu,"bytes":%zu,"stream":%d,"compute_stream":%s)", name, task.number, bytes,
        StreamNumber(stream), OnComputeStream(stream) ? "true" : "false");
  return Enqueue(stream, std::move(task));
}

void FillCommunicators(C_DeviceInterface* table) {
  table->xccl_get_unique_id_size = IdSize;
  table->xccl_get_unique_id = MakeId;
  table->xccl_comm_init_rank = Join;
  table->xccl_destroy_comm = Leave;
#if SIM_PADDLE_MAJOR >= 3
  table->xccl_get_comm_name = Name;
#endif
}

}  // namespace sim
