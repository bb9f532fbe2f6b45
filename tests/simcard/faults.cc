// Errors that stay, as CUDA's do, and the rules of SIM_STALL and SIM_FAIL that bring them about.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "card.h"

namespace sim {
namespace {

std::atomic<bool> g_failed[kMostCards];
std::string g_failure[kMostCards];
std::mutex g_lock;

// "rank=1,kernel=conv2d,count=3": the third conv2d that rank 1 launches. Fields that are not given match everything.
struct Rule {
  bool fails = false;
  std::string kernel, stream;
  uint64_t collective = 0, count = 1, seen = 0;
  bool collectives_only = false;
  double seconds = 0;

  bool Matches(const std::string& name, bool is_collective, uint64_t number, bool on_compute) {
    if (collectives_only && (!is_collective || number != collective)) return false;
    if (!kernel.empty() && kernel != name) return false;
    if (!stream.empty() && (stream == "compute") != on_compute) return false;
    return collectives_only || ++seen == count;
  }
};

[[noreturn]] void Refuse(const char* variable, const std::string& text) {
  std::fprintf(stderr, "simcard: %s: cannot read '%s'; an example: rank=1,kernel=conv2d,count=3\n", variable, text.c_str());
  std::exit(2);
}

void ReadRules(const char* variable, bool fails, std::vector<Rule>* rules) {
  const char* text = std::getenv(variable);
  std::stringstream all(text ? text : "");
  for (std::string one; std::getline(all, one, ';');) {
    Rule rule;
    rule.fails = fails;
    bool mine = true;
    std::stringstream fields(one);
    for (std::string field; std::getline(fields, field, ',');) {
      size_t at = field.find('=');
      if (at == std::string::npos) Refuse(variable, one);
      std::string key = field.substr(0, at), value = field.substr(at + 1);
      if (key == "rank") mine = std::atoi(value.c_str()) == settings().rank;
      else if (key == "kernel") rule.kernel = value;
      else if (key == "stream" && (value == "compute" || value == "communication")) rule.stream = value;
      else if (key == "collective") rule.collective = std::strtoull(value.c_str(), nullptr, 10), rule.collectives_only = true;
      else if (key == "count") rule.count = std::strtoull(value.c_str(), nullptr, 10);
      else if (key == "seconds") rule.seconds = std::atof(value.c_str());
      else Refuse(variable, one);
    }
    if (mine) rules->push_back(rule);
  }
}

std::vector<Rule>& Rules() {
  static std::vector<Rule> rules = [] {
    std::vector<Rule> read;
    ReadRules("SIM_STALL", false, &read);
    ReadRules("SIM_FAIL", true, &read);
    return read;
  }();
  return rules;
}

}  // namespace

bool Failed(int card) { return g_failed[card]; }

void Fail(int card, const std::string& why) {
  {
    std::lock_guard<std::mutex> held(g_lock);
    if (g_failed[card]) return;
    g_failure[card] = why;
  }
  g_failed[card] = true;
  std::fprintf(stderr, "simcard: card %d failed: %s\n", card, why.c_str());
  Trace("failure", R"("card":%d)", card);
}

std::string FailureOf(int card) {
  std::lock_guard<std::mutex> held(g_lock);
  return g_failure[card];
}

// Called at the launch, so that the count does not depend on how fast the streams are.
void ApplyRules(Task* task, bool collective, uint64_t collective_number, bool compute_stream) {
  std::lock_guard<std::mutex> held(g_lock);
  for (Rule& rule : Rules()) {
    if (!rule.Matches(task->name, collective, collective_number, compute_stream)) continue;
    (rule.fails ? task->fails : task->stalls) = true;
    task->stall_seconds = rule.seconds;
  }
}

}  // namespace sim
