// CUDA graphs: what is enqueued on a capturing stream is kept instead of run, and each launch enqueues all of it again.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "queues.h"

namespace device {

struct Graph {
  struct Node {
    std::function<Item()> make;  // one for each launch
    std::vector<int> after;      // nodes that come first
  };
  std::vector<Node> nodes;
};

// A capture in progress. A stream belongs to it from cudaStreamBeginCapture on, or once it waits for an event of it.
struct Capture {
  unsigned long long id;
  Stream *origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  std::vector<Stream *> streams;
  bool invalid = false;  // a call that a capture does not allow came between
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
};

// As CUDA has it, a capture is invalid after any of these errors. They take the lock.
cudaError_t refuse_while_capturing(Stream &);  // a call that waits for the stream, or copies pageable memory
cudaError_t refuse_unsafe_call();              // cudaMalloc, cudaEventQuery and others that some captures forbid
cudaError_t refuse_captured(const Event &);    // its moment is within a graph, where the host cannot see it
cudaError_t refuse_record(Stream &, unsigned flags);
cudaError_t refuse_wait(Stream &, const Event &);

// Under the lock: whether a capture keeps it.
bool keep_instead(Stream &, const std::function<Item()> &make);
// They take the lock: whether record and wait_on_stream are done with that.
bool note_captured(Event &, Stream &);
bool wait_captured(Stream &, const Event &);

}  // namespace device
