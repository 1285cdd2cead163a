// NCCL among the processes of one host. What a rank gives to a collective is a file in $EMULATED_CUDA_DIR, named by
// communicator, number and rank. A collective is an item of its stream; it runs in its communicator's order and is done
// once the files of all members are there. Members that call different operations, counts, types or roots are named,
// and the process aborts.
#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "calls.h"
#include "memory.h"
#include "graphs.h"
#include "queues.h"
#include "reductions.h"

using namespace device;

namespace {

enum Operation { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SPLIT, MESSAGE };
const char *NAMES[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Split", "Send"};

struct Communicator {
  int size, rank;
  uint64_t id;
  long next = 0, done = 0;               // collectives called, and executed
  bool aborted = false;
  std::map<std::pair<bool, int>, long> messages;  // (sent, peer) -> number so far
  std::map<int, double> factors;         // operators made by ncclRedOpCreatePreMulSum
};

// What all members of a collective must agree on, in front of each file.
struct Header {
  int operation, type, reduction, root;
  size_t count, bytes;
};

[[noreturn]] void give_up(const std::string &what) {
  fprintf(stderr, "emulated CUDA device: %s\n", what.c_str());
  abort();
}

std::string file_of(const Communicator &c, const char *kind, long number, int from, int to = 0) {
  char path[512];
  const char *folder = getenv("EMULATED_CUDA_DIR");
  if (!folder) give_up("EMULATED_CUDA_DIR is not set: a folder that the ranks of a job share");
  snprintf(path, sizeof path, "%s/%016lx.%s.%ld.%d.%d", folder, c.id, kind, number, from, to);
  return path;
}

void write_file(const std::string &path, const Header &header, const void *data) {
  std::string unfinished = path + "~";
  FILE *file = fopen(unfinished.c_str(), "w");
  bool written = file && fwrite(&header, sizeof header, 1, file) == 1 &&
                 fwrite(data, 1, header.bytes, file) == header.bytes && fclose(file) == 0;
  if (!written || rename(unfinished.c_str(), path.c_str())) give_up("cannot write " + path);
}

bool read_file(const std::string &path, Header &header, std::string &data) {
  FILE *file = fopen(path.c_str(), "r");
  if (!file) return false;
  bool read = fread(&header, sizeof header, 1, file) == 1;
  data.resize(header.bytes);
  if (!read || fread(data.data(), 1, header.bytes, file) != header.bytes) give_up("cannot read " + path);
  fclose(file);
  return true;
}

std::string described(int rank, const Header &h) {
  char text[200];
  snprintf(text, sizeof text, "rank %d calls %s (count %zu, type %d, reduction %d, root %d)", rank, NAMES[h.operation],
           h.count, h.type, h.reduction, h.root);
  return text;
}

// One collective of one rank: what it needs while it waits for the others.
struct Exchange {
  Communicator &communicator;
  long number;
  Header header;
  std::string own;                 // what this rank gives
  bool posted = false;
  std::vector<std::string> given;  // by rank, once it is there
  std::vector<bool> there;

  // Whether all members' files have been read. The order of a communicator is the order of its calls.
  bool complete() {
    {
      Lock held(lock());
      if (communicator.aborted) return true;
      if (communicator.done != number) return false;
    }
    if (!posted) {
      write_file(file_of(communicator, "c", number, communicator.rank), header, own.data());
      posted = true;
      given.resize(communicator.size), there.resize(communicator.size);
    }
    for (int rank = 0; rank < communicator.size; rank++) {
      if (there[rank]) continue;
      Header other;
      if (!read_file(file_of(communicator, "c", number, rank), other, given[rank])) return false;
      auto agreed = [](const Header &h) { return std::tuple(h.operation, h.type, h.reduction, h.root, h.count); };
      if (agreed(other) != agreed(header))
        give_up("NCCL mismatch in collective " + std::to_string(number) + " of a communicator: " +
                described(communicator.rank, header) + ", " + described(rank, other));
      there[rank] = true;
    }
    // All have posted this one, so all have read the one before.
    if (number) unlink(file_of(communicator, "c", number - 1, communicator.rank).c_str());
    return true;
  }
};

// Writes the collective's result at `to`; call it once the exchange is complete.
void deliver(const Exchange &exchange, void *to) {
  const Communicator &c = exchange.communicator;
  auto [operation, type, reduction, root, count, _] = exchange.header;
  size_t bytes = count * bytes_of(Type(type));
  switch (operation) {
    case ALL_REDUCE: return reduce(exchange.given, 0, count, to, Type(type), Reduction(reduction));
    case REDUCE:
      if (c.rank == root) reduce(exchange.given, 0, count, to, Type(type), Reduction(reduction));
      return;
    case REDUCE_SCATTER: return reduce(exchange.given, c.rank * count, count, to, Type(type), Reduction(reduction));
    case BROADCAST: memcpy(to, exchange.given[root].data(), bytes); return;
    case ALL_GATHER:
      for (int rank = 0; rank < c.size; rank++)
        memcpy(static_cast<char *>(to) + rank * bytes, exchange.given[rank].data(), bytes);
      return;
    case ALL_TO_ALL:
      for (int rank = 0; rank < c.size; rank++)
        memcpy(static_cast<char *>(to) + rank * bytes, exchange.given[rank].data() + c.rank * bytes, bytes);
      return;
  }
}

size_t elements_given(Operation operation, size_t count, int root, const Communicator &c) {
  if (operation == REDUCE_SCATTER || operation == ALL_TO_ALL) return count * c.size;
  return operation == BROADCAST && c.rank != root ? 0 : count;
}

int collective(Operation operation, const void *from, void *to, size_t count, int type, int reduction, int root,
               Communicator *c, void *stream) {
  size_t length = elements_given(operation, count, root, *c);
  double factor = 1;
  Lock held(lock());
  bool scaled = reduction >= PRE_MUL_SUM;
  if (scaled) factor = c->factors.at(reduction);
  Header header{operation, type, scaled ? int(PRE_MUL_SUM) : reduction, root, count, length * bytes_of(Type(type))};
  held.unlock();
  push_made(stream_of(static_cast<cudaStream_t>(stream)), [=]() -> Item {
    device::count(Count::COLLECTIVES, 1);
    Lock held(lock());
    auto exchange = std::make_shared<Exchange>(*c, c->next++, header);
    auto run = [=] {
      if (exchange->own.size() != header.bytes) {  // the stream's turn has come: what is in the buffer now counts
        exchange->own.resize(header.bytes);
        if (scaled) scale(from, length, exchange->own.data(), Type(type), factor);
        else memcpy(exchange->own.data(), from, header.bytes);
      }
      if (!exchange->complete()) return false;
      if (!c->aborted) deliver(*exchange, to);
      Lock held(lock());
      c->done = exchange->number + 1;
      return true;
    };
    return {NAMES[operation], run, c->id};
  });
  return 0;
}

// A group's messages of one stream are one item: all are sent, then all are awaited. Sends are buffered; NCCL's may wait.
struct Message {
  Communicator *communicator;
  bool sent;
  int peer;
  char *at;
  size_t bytes;
  long number;
  bool done = false;
};
thread_local int open_groups = 0;
thread_local auto &grouped = *new std::map<void *, std::vector<Message>>;

bool send(Message &m) {
  Communicator &c = *m.communicator;
  write_file(file_of(c, "p", m.number, c.rank, m.peer), {MESSAGE, 0, 0, 0, m.bytes, m.bytes}, m.at);
  return true;
}

bool receive(Message &m) {
  Communicator &c = *m.communicator;
  std::string path = file_of(c, "p", m.number, m.peer, c.rank), data;
  Header header;
  if (!read_file(path, header, data)) return c.aborted;
  if (header.bytes != m.bytes)
    give_up("NCCL mismatch: rank " + std::to_string(m.peer) + " sends " + std::to_string(header.bytes) +
            " bytes, rank " + std::to_string(c.rank) + " expects " + std::to_string(m.bytes));
  unlink(path.c_str());
  memcpy(m.at, data.data(), m.bytes);
  return true;
}

void push_messages() {
  for (auto &[stream, list] : grouped) {
    auto messages = std::make_shared<std::vector<Message>>(list);
    auto run = [messages] {
      for (bool sends : {true, false})
        for (Message &m : *messages)
          if (m.sent == sends && !m.done && !(m.done = sends ? send(m) : receive(m))) return false;
      return true;
    };
    push(stream_of(static_cast<cudaStream_t>(stream)), {"Send and Recv", run, list[0].communicator->id});
  }
  grouped.clear();
}

int message(bool sent, void *at, size_t count, int type, int peer, Communicator *c, void *stream) {
  size_t bytes = count * bytes_of(Type(type));
  if (auto error = refuse_while_capturing(stream_of(static_cast<cudaStream_t>(stream)))) return error;  // not emulated
  device::count(Count::COLLECTIVES, 1);
  Lock held(lock());
  long number = c->messages[{sent, peer}]++;
  held.unlock();
  grouped[stream].push_back({c, sent, peer, static_cast<char *>(at), bytes, number});
  if (!open_groups) push_messages();
  return 0;
}

struct UniqueId {
  char bytes[128];
};

// FNV-1a
uint64_t digest(const void *data, size_t bytes) {
  uint64_t hash = 1469598103934665603ull;
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ static_cast<const unsigned char *>(data)[i]) * 1099511628211ull;
  return hash;
}

int make(Communicator **c, int size, int rank, uint64_t id) {
  *c = new Communicator{size, rank, id};
  return 0;
}

}  // namespace

API int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, Communicator *c, void *stream) {
  return collective(ALL_REDUCE, from, to, n, type, op, 0, c, stream);
}
API int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, Communicator *c, void *stream) {
  return collective(BROADCAST, from, to, n, type, 0, root, c, stream);
}
API int ncclBcast(void *at, size_t n, int type, int root, Communicator *c, void *stream) {
  return collective(BROADCAST, at, at, n, type, 0, root, c, stream);
}
API int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, Communicator *c, void *stream) {
  return collective(REDUCE, from, to, n, type, op, root, c, stream);
}
API int ncclAllGather(const void *from, void *to, size_t n, int type, Communicator *c, void *stream) {
  return collective(ALL_GATHER, from, to, n, type, 0, 0, c, stream);
}
API int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, Communicator *c, void *stream) {
  return collective(REDUCE_SCATTER, from, to, n, type, op, 0, c, stream);
}
API int ncclAlltoAll(const void *from, void *to, size_t n, int type, Communicator *c, void *stream) {
  return collective(ALL_TO_ALL, from, to, n, type, 0, 0, c, stream);
}
API int ncclSend(const void *from, size_t n, int type, int peer, Communicator *c, void *stream) {
  return message(true, const_cast<void *>(from), n, type, peer, c, stream);
}
API int ncclRecv(void *to, size_t n, int type, int peer, Communicator *c, void *stream) {
  return message(false, to, n, type, peer, c, stream);
}
API int ncclGroupStart() {
  open_groups++;
  return 0;
}
API int ncclGroupEnd() {
  if (--open_groups == 0) push_messages();
  return 0;
}

API int ncclGetVersion(int *version) {
  *version = 22907;
  return 0;
}
API int ncclGetUniqueId(UniqueId *id) {
  FILE *random = fopen("/dev/urandom", "r");
  bool read = random && fread(id, sizeof *id, 1, random) == 1;
  if (random) fclose(random);
  return read ? 0 : 1;
}
API int ncclCommInitRankConfig(Communicator **c, int size, UniqueId id, int rank, void *) {
  return make(c, size, rank, digest(&id, sizeof id));
}
API int ncclCommInitRank(Communicator **c, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(c, size, id, rank, nullptr);
}
API int ncclCommInitRankScalable(Communicator **c, int size, int rank, int num_ids, UniqueId *ids, void *) {
  return make(c, size, rank, digest(ids, num_ids * sizeof(UniqueId)));
}
API int ncclCommSplit(Communicator *parent, int color, int key, Communicator **c, void *) {
  struct Wish {
    int color, key, rank;
  } own{color, key, parent->rank};
  Header header{SPLIT, 0, 0, 0, 1, sizeof own};
  Lock held(lock());
  Exchange exchange{*parent, parent->next++, header, std::string(reinterpret_cast<char *>(&own), sizeof own)};
  held.unlock();
  while (!exchange.complete()) usleep(200);
  held.lock();
  parent->done = exchange.number + 1;
  held.unlock();
  *c = nullptr;
  if (color < 0) return 0;
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (auto &text : exchange.given) {
    auto *wish = reinterpret_cast<const Wish *>(text.data());
    if (wish->color == color) members.push_back({wish->key, wish->rank});
  }
  std::sort(members.begin(), members.end());
  int rank = std::find(members.begin(), members.end(), std::pair(key, parent->rank)) - members.begin();
  uint64_t origin[] = {parent->id, uint64_t(exchange.number), uint64_t(color)};
  return make(c, members.size(), rank, digest(origin, sizeof origin));
}
API int ncclCommCount(Communicator *c, int *size) {
  *size = c->size;
  return 0;
}
API int ncclCommUserRank(Communicator *c, int *rank) {
  *rank = c->rank;
  return 0;
}
API int ncclCommGetAsyncError(Communicator *, int *error) { return *error = 0; }
API int ncclCommAbort(Communicator *c) {
  Lock held(lock());
  c->aborted = true;
  return 0;
}
API const char *ncclGetErrorString(int) { return "emulated device"; }
API const char *ncclGetLastError(Communicator *) { return "emulated device"; }
API int ncclMemAlloc(void **pointer, size_t bytes) {
  *pointer = allocate(bytes, Place::DEVICE);
  return *pointer ? 0 : 1;
}
API int ncclMemFree(void *pointer) {
  release(pointer);
  return 0;
}
API int ncclRedOpCreatePreMulSum(int *op, void *factor, int type, int, Communicator *c) {
  drain_all();  // the factor may lie in device memory
  Lock held(lock());
  *op = PRE_MUL_SUM + c->factors.size();
  c->factors[*op] = number_at(factor, Type(type));
  return 0;
}
