// Collectives: every rank puts its part into its slot, all meet, every rank takes what it needs, all meet again.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "communicator.h"
#include "reduce.h"

namespace sim {
namespace {

enum Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter };
const char* const kNames[] = {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"};

struct Collective {
  Kind kind;
  const char* send;
  char* recv;
  size_t count;
  C_DataType type;
  C_CCLReduceOp op;
  size_t root;
  C_CCLComm comm;

  void Run() const {
    const size_t width = Width(type), most = kSlot / width;
    const size_t whole = kind == kReduceScatter ? count * comm->size : count;
    Seat& seat = comm->seat(comm->rank);
    seat.count = count, seat.kind = kind, seat.dtype = type;
    for (size_t at = 0; at < whole || at == 0; at += most) {
      size_t piece = std::min(most, whole - at);
      if (kind != kBroadcast || comm->rank == root) std::memcpy(comm->slot(comm->rank), send + at * width, piece * width);
      comm->Meet();
      if (at == 0) Compare();
      Take(at, piece, width);
      comm->Meet();
    }
  }

  void Take(size_t at, size_t piece, size_t width) const {
    const size_t me = comm->rank;
    auto reduce = [&](size_t first, size_t many, char* to) {
      Reduce(type, [&](size_t rank) { return comm->slot(rank) + first * width; }, comm->size, to, many, op);
    };
    switch (kind) {
      case kReduce:
        if (me != root) break;
        [[fallthrough]];
      case kAllReduce:
        reduce(0, piece, recv + at * width);
        break;
      case kBroadcast:
        if (me != root) std::memcpy(recv + at * width, comm->slot(root), piece * width);
        break;
      case kAllGather:
        for (size_t rank = 0; rank < comm->size; ++rank)
          std::memcpy(recv + (rank * count + at) * width, comm->slot(rank), piece * width);
        break;
      case kReduceScatter: {
        size_t first = std::max(at, me * count), last = std::min(at + piece, (me + 1) * count);
        if (first < last) reduce(first - at, last - first, recv + (first - me * count) * width);
      }
    }
  }

  void Compare() const {
    for (size_t rank = 0; rank < comm->size; ++rank) {
      Seat& other = comm->seat(rank);
      if (other.count == count && other.kind == kind && other.dtype == type) continue;
      std::fprintf(stderr, "simcard: rank %zu is in %s of %zu (data type %d), rank %zu in %s of %zu (data type %d)\n",
                   comm->rank, kNames[kind], count, int(type), rank, kNames[other.kind], other.count, other.dtype);
      while (true) Progress();  // NCCL hangs, or worse
    }
  }
};

C_Status Launch(Kind kind, const void* send, void* recv, size_t count, C_DataType type, C_CCLReduceOp op, size_t root,
                C_CCLComm comm, C_Stream stream) {
  Collective one{kind, static_cast<char*>(Reach(send)), static_cast<char*>(Reach(recv)), count, type, op, root, comm};
  return LaunchCollective(kNames[kind], count * Width(type), comm, stream, [=] { one.Run(); });
}

C_Status AllReduce(void* send, void* recv, size_t n, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
  return Launch(kAllReduce, send, recv, n, type, op, 0, comm, stream);
}

C_Status Broadcast(void* buffer, size_t n, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  return Launch(kBroadcast, buffer, buffer, n, type, SUM, root, comm, stream);
}

C_Status ReduceToRoot(void* send, void* recv, size_t n, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm comm,
                      C_Stream stream) {
  return Launch(kReduce, send, recv, n, type, op, root, comm, stream);
}

C_Status AllGather(void* send, void* recv, size_t n, C_DataType type, C_CCLComm comm, C_Stream stream) {
  return Launch(kAllGather, send, recv, n, type, SUM, 0, comm, stream);
}

C_Status ReduceScatter(void* send, void* recv, size_t n, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                       C_Stream stream) {
  return Launch(kReduceScatter, send, recv, n, type, op, 0, comm, stream);
}

}  // namespace

size_t SumOverRanks(C_Stream stream, const Values& values) {
  if (!World() || settings().local_sync_bn) return 1;
  auto* data = reinterpret_cast<char*>(values->data());
  Collective one{kAllReduce, data, data, values->size(), FLOAT32, SUM, 0, World()};
  LaunchCollective(kNames[kAllReduce], values->size() * sizeof(float), World(), stream, [one, values] { one.Run(); });
  return World()->size;
}

void FillCollectives(C_DeviceInterface* table) {
  FillCommunicators(table);
  FillTransfers(table);
  table->xccl_all_reduce = AllReduce;
  table->xccl_broadcast = Broadcast;
  table->xccl_reduce = ReduceToRoot;
  table->xccl_all_gather = AllGather;
  table->xccl_reduce_scatter = ReduceScatter;
}

}  // namespace sim
