// One thread of the process is the device: it runs the items that the program's threads push.
#include "graphs.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace device {
namespace {

// Never destroyed: threads of torch still use them while the process ends.
auto &work_arrived = *new std::condition_variable;
auto &progress = *new std::condition_variable;
auto &streams = *new std::vector<Stream *>;
auto &default_streams = *new std::map<int, Stream *>;
std::atomic<bool> forked;  // a child has no device thread; what it inherits is never waited for
double last_push = 0;
thread_local int this_device = 0;

// Shared by the ranks of a host, in $EMULATED_CUDA_DIR: the communicator that each rank waits in, or 0.
constexpr int MOST_RANKS = 64;
struct Board {
  std::atomic<int> ranks;
  std::atomic<uint64_t> waits_in[MOST_RANKS];
};
Board *board = nullptr;
int own_place = 0;

void join_board() {
  const char *folder = getenv("EMULATED_CUDA_DIR");
  if (!folder) return;
  int file = open((std::string(folder) + "/board").c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, 4096)) {
    perror("emulated CUDA device: $EMULATED_CUDA_DIR");
    abort();
  }
  void *at = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) abort();
  board = static_cast<Board *>(at);
  own_place = board->ranks++;
}

// Late order: other ranks wait for collectives that lie in our queues. Those may move up to there, no further: moving
// all of them would hide a collective that the program forgot to wait for.
void note_needs_of_peers() {
  for (int place = 0; board && place < std::min(board->ranks.load(), MOST_RANKS); place++) {
    uint64_t wanted = place == own_place ? 0 : board->waits_in[place].load();
    if (!wanted) continue;
    for (Stream *stream : streams) {
      if (!stream->collectives) continue;
      auto found = std::find_if(stream->items.begin(), stream->items.end(),
                                [&](const Item &item) { return item.communicator == wanted; });
      if (found == stream->items.end()) continue;
      long position = stream->done + (found - stream->items.begin()) + 1;
      stream->needed_by_peers = std::max(stream->needed_by_peers, position);
    }
  }
}

// Streams with work that this rank's host waits for, or its peers.
std::vector<Stream *> movable(bool everything, bool peers) {
  std::vector<Stream *> found;
  for (Stream *stream : streams)
    if (!stream->items.empty() && !stream->running &&
        (everything || (peers ? stream->needed_by_peers : stream->needed) > stream->done))
      found.push_back(stream);
  return found;
}

Stream &add_stream() {  // under the lock
  streams.push_back(new Stream);
  return *streams.back();
}

void finish_first(Stream &stream) {
  stream.done++;
  if (stream.items.front().communicator) stream.collectives--;
  stream.items.pop_front();
}

// Whether the stream's first item is done. The lock is released while it runs.
bool run_first(Stream &stream, Lock &held) {
  Item &item = stream.items.front();  // a deque's elements stay where they are while others are added
  stream.running = true;
  held.unlock();
  bool done = item.run();
  held.lock();
  stream.running = false;
  if (done) finish_first(stream);
  return done;
}

void run_device() {
  std::mt19937 random(setting("EMULATED_CUDA_SEED", 1) + getpid());
  // Late order: after so long without work, something outside waits perhaps, and all queues move.
  const int lull_ms = setting("EMULATED_CUDA_LULL_MS", 3000);
  double last_move = now_ms();
  Lock held(lock());
  for (;;) {
    note_needs_of_peers();
    bool everything = order() != Order::LATE || now_ms() - std::max(last_move, last_push) > lull_ms;
    bool moved = false, any = false;
    uint64_t stuck_in = 0;
    for (bool peers : {false, true}) {  // own needs first, which may wait for what only a peer needs of this rank
      if (moved) break;
      std::vector<Stream *> candidates = movable(everything, peers);
      if (order() != Order::EAGER) std::shuffle(candidates.begin(), candidates.end(), random);
      any |= !candidates.empty();
      for (Stream *stream : candidates) {
        if ((moved = run_first(*stream, held))) break;
        if (!stuck_in) stuck_in = stream->items.front().communicator;
      }
    }
    if (moved) {
      last_move = now_ms();
      progress.notify_all();
      if (order() == Order::RANDOM && random() % 8 == 0) {
        held.unlock();
        usleep(random() % 300);
        held.lock();
      }
      continue;
    }
    if (board && own_place < MOST_RANKS) board->waits_in[own_place] = stuck_in;
    work_arrived.wait_for(held, std::chrono::microseconds(any ? 100 : 500));
  }
}

void start_device() {  // under the lock
  static bool started;
  if (started || forked) return;
  started = true;
  join_board();
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  std::thread(run_device).detach();
}

void wait_until(Stream &stream, long position, Lock &held) {
  if (stream.done >= position || forked) return;
  stream.needed = std::max(stream.needed, position);
  work_arrived.notify_one();
  progress.wait(held, [&] { return stream.done >= position; });
}

}  // namespace

int setting(const char *variable, int otherwise) {
  const char *value = getenv(variable);
  return value ? atoi(value) : otherwise;
}

double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

Order order() {
  static Order chosen = [] {
    std::string name = getenv("EMULATED_CUDA_ORDER") ?: "eager";
    if (name != "eager" && name != "random" && name != "late") {
      fprintf(stderr, "EMULATED_CUDA_ORDER is \"%s\": eager, random or late.\n", name.c_str());
      abort();
    }
    return name == "late" ? Order::LATE : name == "random" ? Order::RANDOM : Order::EAGER;
  }();
  return chosen;
}

std::mutex &lock() {
  static auto &only = *new std::mutex;
  return only;
}

int current_device() { return this_device; }
void set_current_device(int index) { this_device = index; }

Stream &new_stream() {
  Lock held(lock());
  return add_stream();
}

Stream &stream_of(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return *reinterpret_cast<Stream *>(handle);
  Lock held(lock());
  Stream *&stream = default_streams[this_device];
  if (!stream) {
    stream = &add_stream();
    stream->legacy = true;
  }
  return *stream;
}

void push_made(Stream &stream, const std::function<Item()> &make) {
  {
    Lock held(lock());
    if (keep_instead(stream, make)) return;
  }
  push(stream, make());
}

long push(Stream &stream, Item item) {
  Lock held(lock());
  if (stream.capture) {
    keep_instead(stream, [item] { return item; });
    return 0;
  }
  start_device();
  bool at_once = order() == Order::EAGER && stream.items.empty() && !stream.running;
  long position = ++stream.pushed;
  if (item.communicator) stream.collectives++;
  stream.items.push_back(std::move(item));
  last_push = now_ms();
  if (!at_once) {
    if (order() != Order::LATE) work_arrived.notify_one();
    return position;
  }
  bool done = run_first(stream, held);
  if (!done || !stream.items.empty()) work_arrived.notify_one();
  if (done) progress.notify_all();
  return position;
}

void drain(Stream &stream) {
  Lock held(lock());
  wait_until(stream, stream.pushed, held);
}

void drain_all() {
  Lock held(lock());
  for (size_t i = 0; i < streams.size(); i++) wait_until(*streams[i], streams[i]->pushed, held);
}

void record(Event &event, Stream &stream) {
  if (note_captured(event, stream)) return;
  auto time = std::make_shared<double>(0);
  long position = push(stream, {"event", [time] {
                                  *time = now_ms();
                                  return true;
                                }});
  Lock held(lock());
  event = {&stream, position, time, nullptr, {}};
}

bool passed(const Event &event) {
  Lock held(lock());
  return !event.stream || event.stream->done >= event.position;
}

void wait_on_stream(Stream &stream, const Event &event) {
  if (wait_captured(stream, event)) return;
  Stream *other;
  long position;
  {
    Lock held(lock());
    other = event.stream, position = event.position;  // as it is now: it may be recorded again
    if (!other || other == &stream || other->done >= position) return;
  }
  push(stream, {"wait for an event", [other, position] {
                  Lock held(lock());
                  if (other->done >= position) return true;
                  other->needed = std::max(other->needed, position);
                  return false;
                }});
}

void wait_on_host(const Event &event) {
  Lock held(lock());
  if (event.stream) wait_until(*event.stream, event.position, held);
}

}  // namespace device
