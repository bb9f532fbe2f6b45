// The knobs of the environment. README.md has the table.
#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "card.h"

namespace sim {
namespace {

size_t Number(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::string Text(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

// A file for each rank: %r stands for the rank.
std::string WithRank(std::string path, int rank) {
  size_t at = path.find("%r");
  return at == std::string::npos ? path : path.replace(at, 2, std::to_string(rank));
}

Settings Read() {
  Settings read;
  read.cards = std::min(Number("SIM_CARDS", 2), kMostCards);
  read.memory = Number("SIM_MEMORY", size_t(1) << 30) / 4096 * 4096;
  read.delay_us = Number("SIM_DELAY_US", 0);
  read.collective_delay_us = Number("SIM_COLLECTIVE_DELAY_US", 0);
  read.copy_delay_us = Number("SIM_COPY_DELAY_US", 0);
  read.local_sync_bn = Text("SIM_SYNC_BN") == "local";
  read.all_pinned = Number("SIM_PINNED", 0);
  read.rank = static_cast<int>(Number("PADDLE_TRAINER_ID", 0));
  read.trace = WithRank(Text("SIM_TRACE"), read.rank);
  std::stringstream list(Text("SIM_WITHOUT"));
  for (std::string one; std::getline(list, one, ',');) read.without.push_back(one);
  return read;
}

}  // namespace

const Settings& settings() {
  static const Settings read = Read();
  return read;
}

bool Lacks(const std::string& kernel_or_type) {
  const auto& list = settings().without;
  return std::find(list.begin(), list.end(), kernel_or_type) != list.end();
}

}  // namespace sim
