// Streams and events. A stream is a thread that works off a queue; an event is a number that a stream reaches.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "card.h"

struct C_Stream_st {
  int card, number;
  std::atomic<bool> compute{false};
  std::mutex lock;
  std::condition_variable came, idle;
  std::deque<sim::Task> tasks;
  bool busy = false, quits = false;
};

struct C_Event_st {
  struct State {
    std::mutex lock;
    std::condition_variable changed;
    size_t recorded = 0, reached = 0;
  };
  std::shared_ptr<State> state = std::make_shared<State>();
};

namespace sim {
namespace {

using EventState = std::shared_ptr<C_Event_st::State>;

std::mutex g_streams_lock;
std::set<C_Stream> g_streams;

// The end of the process. A thread that still runs a CPU kernel would crash when the static objects of Paddle go, so
// the streams stop between two tasks: as with CUDA, work that nobody waited for is lost.
std::atomic<bool> g_exiting{false};
std::atomic<int> g_running{0};

[[noreturn]] void Park() {
  for (;;) pause();
}

void StopStreams() {
  g_exiting = true;
  for (int tries = 0; g_running > 0 && tries < 5000; ++tries) usleep(1000);
}

void Stall(const Task& task) {
  Trace("stall", R"("name":"%s","seconds":%.3f)", task.name.c_str(), task.stall_seconds);
  for (double waited = 0; task.stall_seconds == 0 || waited < task.stall_seconds; waited += 0.01) {
    if (g_exiting) Park();
    usleep(10000);
  }
}

void Execute(C_Stream stream, const Task& task) {
  bool named = !task.name.empty();
  if (named) Trace("begin", R"("name":"%s","number":%zu,"stream":%d)", task.name.c_str(), task.number, stream->number);
  if (task.stalls) Stall(task);
  if (task.delay_us) usleep(task.delay_us);
  ++g_running;
  if (g_exiting) {
    --g_running;
    Park();
  }
  try {
    if (task.fails) throw std::runtime_error("failed as SIM_FAIL says");
    task.run();
  } catch (const std::exception& error) {
    Fail(stream->card, task.name + ": " + error.what());
  }
  Count(task.done);
  if (named) Trace("end", R"("name":"%s","number":%zu,"stream":%d)", task.name.c_str(), task.number, stream->number);
  --g_running;
}

void Work(C_Stream stream) {
  CurrentCard() = stream->card;
  std::unique_lock<std::mutex> held(stream->lock);
  while (true) {
    stream->came.wait(held, [&] { return stream->quits || !stream->tasks.empty(); });
    if (stream->tasks.empty()) return;
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    stream->busy = true;
    held.unlock();
    // Events are reached on a failed card too: nobody shall wait for what will not come.
    if (!Failed(stream->card) || task.name.empty()) Execute(stream, task);
    task = Task();  // what it holds goes before the stream counts as idle
    held.lock();
    stream->busy = false;
    if (stream->tasks.empty()) stream->idle.notify_all();
  }
}

C_Status Create(const C_Device card, C_Stream* stream) {
  static std::atomic<int> created{0};
  auto* made = new C_Stream_st;
  made->card = card->id;
  made->number = created++;
  {
    std::lock_guard<std::mutex> held(g_streams_lock);
    g_streams.insert(made);
  }
  std::thread(Work, made).detach();
  *stream = made;
  return C_SUCCESS;
}

C_Status Destroy(const C_Device, C_Stream stream) {  // leaked: its thread may hang in a collective
  {
    std::lock_guard<std::mutex> held(g_streams_lock);
    g_streams.erase(stream);
  }
  std::lock_guard<std::mutex> held(stream->lock);
  stream->quits = true;
  stream->came.notify_one();
  return C_SUCCESS;
}

C_Status Query(const C_Device, C_Stream stream) {
  std::lock_guard<std::mutex> held(stream->lock);
  return stream->tasks.empty() && !stream->busy ? C_SUCCESS : C_FAILED;
}

C_Status AddCallback(const C_Device card, C_Stream stream, C_Callback callback, void* data) {
  C_Device_st copy = *card;
  Task task;
  task.run = [=]() mutable {
    C_Status status = C_SUCCESS;
    callback(&copy, stream, data, &status);
  };
  return Enqueue(stream, std::move(task));
}

C_Status CreateEvent(const C_Device, C_Event* event) {
  *event = new C_Event_st;
  return C_SUCCESS;
}

C_Status DestroyEvent(const C_Device, C_Event event) {
  delete event;
  return C_SUCCESS;
}

size_t Recorded(const EventState& state) {
  std::lock_guard<std::mutex> held(state->lock);
  return state->recorded;
}

void Await(const EventState& state, size_t turn) {
  std::unique_lock<std::mutex> held(state->lock);
  state->changed.wait(held, [&] { return state->reached >= turn; });
}

// Not an error on a failed card: Paddle records events in destructors, where an exception ends the process.
C_Status RecordEvent(const C_Device, C_Stream stream, C_Event event) {
  EventState state = event->state;
  size_t turn;
  {
    std::lock_guard<std::mutex> held(state->lock);
    turn = ++state->recorded;
  }
  Trace("record", R"("stream":%d)", StreamNumber(stream));
  Task task;
  task.run = [=] {
    std::lock_guard<std::mutex> held(state->lock);
    state->reached = turn;
    state->changed.notify_all();
  };
  return Enqueue(stream, std::move(task));
}

// On a failed card an event counts as reached: Paddle takes every other status for "not yet", and whoever polls would
// do so for ever, where CUDA raises. The next call raises.
C_Status QueryEvent(const C_Device card, C_Event event) {
  if (Failed(card->id)) return C_SUCCESS;
  std::lock_guard<std::mutex> held(event->state->lock);
  return event->state->reached >= event->state->recorded ? C_SUCCESS : C_FAILED;
}

C_Status SynchronizeEvent(const C_Device card, C_Event event) {
  EventState state = event->state;
  BlockedOn("event", [&] { Await(state, Recorded(state)); });
  return Failed(card->id) ? C_ERROR : C_SUCCESS;
}

C_Status WaitEvent(const C_Device card, C_Stream stream, C_Event event) {
  if (Failed(card->id)) return C_ERROR;
  EventState state = event->state;
  size_t turn = Recorded(state);
  Trace("wait", R"("stream":%d)", StreamNumber(stream));
  Task task;
  task.run = [=] { Await(state, turn); };
  return Enqueue(stream, std::move(task));
}

C_Status SynchronizeDevice(const C_Device card) {
  BlockedOn("device", [&] { DrainCard(card->id); });
  return Failed(card->id) ? C_ERROR : C_SUCCESS;
}

C_Status SynchronizeStream(const C_Device card, C_Stream stream) {
  BlockedOn("stream", [&] { Drain(stream); });
  return Failed(card->id) ? C_ERROR : C_SUCCESS;
}

}  // namespace

C_Status Enqueue(C_Stream stream, Task task) {
  std::lock_guard<std::mutex> held(stream->lock);
  stream->tasks.push_back(std::move(task));
  stream->came.notify_one();
  return C_SUCCESS;
}

C_Status Drain(C_Stream stream) {
  std::unique_lock<std::mutex> held(stream->lock);
  stream->idle.wait(held, [&] { return g_exiting || (stream->tasks.empty() && !stream->busy); });
  return Failed(stream->card) ? C_ERROR : C_SUCCESS;
}

C_Status DrainCard(int card) {
  if (g_exiting) return C_SUCCESS;
  std::set<C_Stream> streams;
  {
    std::lock_guard<std::mutex> held(g_streams_lock);
    streams = g_streams;
  }
  for (C_Stream stream : streams)
    if (stream->card == card) Drain(stream);
  return Failed(card) ? C_ERROR : C_SUCCESS;
}

void BlockedOn(const char* what, const std::function<void()>& wait) {
  Count(kBlockingWaits);
  Trace("block", R"("on":"%s")", what);
  wait();
  Trace("unblock", R"("on":"%s")", what);
}

void Progress() {
  usleep(50);
  if (!g_exiting) return;
  --g_running;
  Park();
}

bool OnComputeStream(C_Stream stream) { return stream->compute; }
void MarkCompute(C_Stream stream) { stream->compute = true; }
int StreamNumber(C_Stream stream) { return stream->number; }

void FillStreams(C_DeviceInterface* table) {
  std::atexit(StopStreams);
  table->create_stream = Create;
  table->destroy_stream = Destroy;
  table->query_stream = Query;
  table->stream_add_callback = AddCallback;
  table->create_event = CreateEvent;
  table->destroy_event = DestroyEvent;
  table->record_event = RecordEvent;
  table->query_event = QueryEvent;
  table->synchronize_event = SynchronizeEvent;
  table->stream_wait_event = WaitEvent;
  table->synchronize_device = SynchronizeDevice;
  table->synchronize_stream = SynchronizeStream;
}

}  // namespace sim
