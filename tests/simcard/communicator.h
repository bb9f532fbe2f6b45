// A communicator: a file in /dev/shm that the ranks of one machine map, also from different network namespaces.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "card.h"

namespace sim {

constexpr size_t kMostRanks = 16, kSlot = size_t(1) << 18, kBox = size_t(1) << 16;

struct alignas(64) Seat {
  std::atomic<uint64_t> turn;  // how many meetings this rank has come to
  size_t count;                // what it does there, to find ranks that do different things
  int kind, dtype;
};

struct alignas(64) Mailbox {   // from one rank to another
  std::atomic<uint64_t> sent, taken;
  size_t bytes;
  char data[kBox];
};

}  // namespace sim

struct C_CCLComm_st {
  size_t size, rank;
  std::string path;
  char* shared;
  uint64_t turn = 0;
  std::atomic<uint64_t> launched{0}, finished{0};

  sim::Seat& seat(size_t of) { return reinterpret_cast<sim::Seat*>(shared)[of]; }
  char* slot(size_t of) { return shared + sim::kMostRanks * sizeof(sim::Seat) + of * sim::kSlot; }
  sim::Mailbox& box(size_t from, size_t to) {
    return reinterpret_cast<sim::Mailbox*>(slot(size))[from * size + to];
  }
  static size_t Bytes(size_t size) {
    return sim::kMostRanks * sizeof(sim::Seat) + size * sim::kSlot + size * size * sizeof(sim::Mailbox);
  }

  // Come to a meeting and wait until all are there, for ever if need be: a lost rank is a hang, as with NCCL.
  void Meet();
};

namespace sim {

// Launches a collective. Those of one communicator run in the order of their launches, whatever their streams.
C_Status LaunchCollective(const char* name, size_t bytes, C_CCLComm comm, C_Stream stream, std::function<void()> run);

C_CCLComm World();  // the communicator of all ranks, if there is one yet

void FillCommunicators(C_DeviceInterface* table);
void FillTransfers(C_DeviceInterface* table);

}  // namespace sim
