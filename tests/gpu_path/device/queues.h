// Streams of the emulated device: queues of items. An event is a position in a queue.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace device {

using Lock = std::unique_lock<std::mutex>;
struct Capture;

// run: false while the item has to wait (for an event, for another rank); it is called again later.
struct Item {
  const char *name;
  std::function<bool()> run;
  uint64_t communicator = 0;  // of a collective
};

struct Stream {
  std::deque<Item> items;
  bool running = false;       // its first item runs now, outside of the lock
  int collectives = 0;        // among its items
  long pushed = 0, done = 0;  // items
  long needed = 0;            // late order: something in this process waits until `done` is as large
  long needed_by_peers = 0;   // the same, in the processes of other ranks
  bool legacy = false;        // a device's default stream
  std::shared_ptr<Capture> capture;  // what is pushed is kept there
  std::vector<int> after;            // nodes of the capture that the next one follows
};

struct Event {
  Stream *stream = nullptr;  // null until it is recorded
  long position = 0;
  std::shared_ptr<double> milliseconds = std::make_shared<double>(0);
  std::shared_ptr<Capture> capture;  // where it was recorded last, if it was a capturing stream
  std::vector<int> after;            // nodes of the capture that it stands for
};

// When items run. EAGER: at once, where nothing is in the way. RANDOM: from any stream, drawn by seed. LATE: a stream
// moves only as far as something waits for it (the host, an event, another rank's collective), so that a wait that is
// missing in the program reads what is not there yet.
enum class Order { EAGER, RANDOM, LATE };
Order order();

int setting(const char *variable, int otherwise);
double now_ms();

std::mutex &lock();  // guards every Stream, Event and communicator
int current_device();
void set_current_device(int index);

Stream &new_stream();
Stream &stream_of(cudaStream_t handle);  // 0, 1 and 2 mean the device's default stream; takes the lock
long push(Stream &, Item);  // its position in the queue, counted from 1; 0 where the stream captures
void push_made(Stream &, const std::function<Item()> &make);  // make: for each time that it is enqueued
void drain(Stream &);  // the host waits
void drain_all();
void record(Event &, Stream &);
bool passed(const Event &);
void wait_on_stream(Stream &, const Event &);
void wait_on_host(const Event &);

}  // namespace device
