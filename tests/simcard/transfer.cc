// Send and receive. What is called between group_start and group_end goes at the same time, as with NCCL.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "communicator.h"
#include "reduce.h"

namespace sim {
namespace {

struct Transfer {
  bool sends;
  char* data;
  size_t bytes, peer, moved = 0;

  bool Done() const { return moved == bytes; }

  void Step(C_CCLComm comm) {  // as much as goes without waiting
    Mailbox& box = sends ? comm->box(comm->rank, peer) : comm->box(peer, comm->rank);
    bool full = box.sent.load(std::memory_order_acquire) > box.taken.load(std::memory_order_acquire);
    if (Done() || full == sends) return;
    if (sends) {
      box.bytes = std::min(kBox, bytes - moved);
      std::memcpy(box.data, data + moved, box.bytes);
      moved += box.bytes;
      box.sent.fetch_add(1, std::memory_order_release);
    } else {
      size_t piece = std::min(box.bytes, bytes - moved);
      std::memcpy(data + moved, box.data, piece);
      moved += piece;
      box.taken.fetch_add(1, std::memory_order_release);
    }
  }
};

using Transfers = std::vector<Transfer>;

// Those of the group that this thread has open; a call outside of a group is a group of one.
thread_local int t_depth = 0;
thread_local std::map<std::pair<C_CCLComm, C_Stream>, Transfers> t_group;

C_Status LaunchGroup() {
  C_Status status = C_SUCCESS;
  for (auto& [target, transfers] : std::exchange(t_group, {})) {
    auto [comm, stream] = target;
    size_t bytes = 0;
    for (auto& one : transfers) bytes += one.bytes;
    const char* name = transfers.size() > 1 ? "transfers" : transfers[0].sends ? "send" : "recv";
    C_Status launched = LaunchCollective(name, bytes, comm, stream, [comm = comm, all = transfers]() mutable {
      while (true) {
        for (auto& one : all) one.Step(comm);
        if (std::all_of(all.begin(), all.end(), [](auto& one) { return one.Done(); })) return;
        Progress();
      }
    });
    if (launched != C_SUCCESS) status = launched;
  }
  return status;
}

C_Status Add(bool sends, const void* data, size_t bytes, size_t peer, C_CCLComm comm, C_Stream stream) {
  t_group[{comm, stream}].push_back({sends, static_cast<char*>(Reach(data)), bytes, peer});
  return t_depth ? C_SUCCESS : LaunchGroup();
}

C_Status Send(void* data, size_t count, C_DataType type, size_t to, C_CCLComm comm, C_Stream stream) {
  return Add(true, data, count * Width(type), to, comm, stream);
}

C_Status Recv(void* data, size_t count, C_DataType type, size_t from, C_CCLComm comm, C_Stream stream) {
  return Add(false, data, count * Width(type), from, comm, stream);
}

C_Status StartGroup() {
  ++t_depth;
  return C_SUCCESS;
}

C_Status EndGroup() { return --t_depth ? C_SUCCESS : LaunchGroup(); }

C_Status AllToAll(const void** send, const size_t* send_count, const C_DataType* send_type, void** recv,
                  const size_t* recv_count, const C_DataType* recv_type, size_t, size_t ranks, C_CCLComm comm,
                  C_Stream stream) {
  StartGroup();
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (send_count[rank]) Add(true, send[rank], send_count[rank] * Width(send_type[rank]), rank, comm, stream);
    if (recv_count[rank]) Add(false, recv[rank], recv_count[rank] * Width(recv_type[rank]), rank, comm, stream);
  }
  return EndGroup();
}

}  // namespace

void FillTransfers(C_DeviceInterface* table) {
  table->xccl_send = Send;
  table->xccl_recv = Recv;
  table->xccl_group_start = StartGroup;
  table->xccl_group_end = EndGroup;
  table->xccl_all_to_all = AllToAll;
}

}  // namespace sim
