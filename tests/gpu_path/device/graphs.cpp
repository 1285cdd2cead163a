// Capture of streams, and launches of what was captured.
#include "graphs.h"

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "calls.h"

namespace device {
namespace {

auto &captures = *new std::vector<std::shared_ptr<Capture>>;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t invalidate(Capture &capture, cudaError_t error) {
  capture.invalid = true;
  return failed(error);
}

void add(std::vector<int> &to, const std::vector<int> &from) {
  for (int node : from)
    if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
}

// Every node is one that the end of the capture's first stream comes after.
bool all_joined(const Capture &capture) {
  std::vector<bool> seen(capture.graph->nodes.size());
  std::vector<int> open = capture.origin->after;
  while (!open.empty()) {
    int node = open.back();
    open.pop_back();
    if (seen[node]) continue;
    seen[node] = true;
    for (int before : capture.graph->nodes[node].after) open.push_back(before);
  }
  return std::find(seen.begin(), seen.end(), false) == seen.end();
}

// An order that the dependencies allow: as captured, or, where streams run out of order, drawn.
std::vector<int> some_order(const Graph &graph) {
  static std::mt19937 random(setting("EMULATED_CUDA_SEED", 1));
  int size = graph.nodes.size();
  std::vector<int> missing(size), ready, found;
  std::vector<std::vector<int>> followers(size);
  for (int node = 0; node < size; node++) {
    missing[node] = graph.nodes[node].after.size();
    if (!missing[node]) ready.push_back(node);
    for (int before : graph.nodes[node].after) followers[before].push_back(node);
  }
  while (!ready.empty()) {
    auto next = order() == Order::EAGER ? std::min_element(ready.begin(), ready.end())
                                        : ready.begin() + random() % ready.size();
    int node = *next;
    ready.erase(next);
    found.push_back(node);
    for (int follower : followers[node])
      if (!--missing[follower]) ready.push_back(follower);
  }
  return found;
}

Graph &graph_of(void *handle) { return *static_cast<Graph *>(handle); }

}  // namespace

bool keep_instead(Stream &stream, const std::function<Item()> &make) {
  if (!stream.capture) return false;
  auto &nodes = stream.capture->graph->nodes;
  nodes.push_back({make, std::exchange(stream.after, {int(nodes.size())})});
  return true;
}

cudaError_t refuse_while_capturing(Stream &stream) {
  Lock held(lock());
  return stream.capture ? invalidate(*stream.capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t refuse_unsafe_call() {
  Lock held(lock());
  for (auto &capture : captures) {
    bool own = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    bool others = thread_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (thread_mode != cudaStreamCaptureModeRelaxed && (own || others))
      return invalidate(*capture, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

cudaError_t refuse_captured(const Event &event) {
  Lock held(lock());
  return event.capture ? invalidate(*event.capture, cudaErrorCapturedEvent) : cudaSuccess;
}

cudaError_t refuse_record(Stream &stream, unsigned flags) {
  Lock held(lock());
  if (!stream.capture || !(flags & cudaEventRecordExternal)) return cudaSuccess;
  return invalidate(*stream.capture, cudaErrorNotSupported);  // a node of its own in CUDA: not emulated
}

cudaError_t refuse_wait(Stream &stream, const Event &event) {
  Lock held(lock());
  if (stream.capture) {
    if (event.capture) return event.capture == stream.capture ? cudaSuccess : failed(cudaErrorStreamCaptureMerge);
    return event.stream ? invalidate(*stream.capture, cudaErrorStreamCaptureIsolation) : cudaSuccess;
  }
  if (!event.capture) return cudaSuccess;
  if (std::find(captures.begin(), captures.end(), event.capture) == captures.end()) return failed(cudaErrorCapturedEvent);
  if (stream.legacy) return invalidate(*event.capture, cudaErrorStreamCaptureImplicit);
  return cudaSuccess;
}

bool note_captured(Event &event, Stream &stream) {
  Lock held(lock());
  if (!stream.capture) return false;
  event = {&stream, 0, std::make_shared<double>(0), stream.capture, stream.after};
  return true;
}

bool wait_captured(Stream &stream, const Event &event) {
  Lock held(lock());
  if (!event.capture) return stream.capture != nullptr;  // refuse_wait has let through what was never recorded
  if (!stream.capture) {
    stream.capture = event.capture;
    stream.capture->streams.push_back(&stream);
  }
  add(stream.after, event.after);
  return true;
}

}  // namespace device

using namespace device;

API int emulated_cuda_captures(void *handle) {
  Stream &stream = stream_of(static_cast<cudaStream_t>(handle));
  Lock held(lock());
  return stream.capture != nullptr;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static unsigned long long ids = 0;
  Stream &stream = stream_of(handle);
  Lock held(lock());
  if (stream.legacy) return failed(cudaErrorStreamCaptureUnsupported);
  if (stream.capture) return failed(cudaErrorIllegalState);
  stream.capture = std::make_shared<Capture>(Capture{++ids, &stream, mode, std::this_thread::get_id(), {&stream}});
  stream.after.clear();
  captures.push_back(stream.capture);
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  Stream &stream = stream_of(handle);
  Lock held(lock());
  *graph = nullptr;
  std::shared_ptr<Capture> capture = stream.capture;
  if (!capture) return failed(cudaErrorIllegalState);
  if (capture->origin != &stream) return invalidate(*capture, cudaErrorStreamCaptureUnmatched);
  bool joined = all_joined(*capture);
  for (Stream *member : capture->streams) member->capture = nullptr, member->after.clear();
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  if (capture->invalid) return failed(cudaErrorStreamCaptureInvalidated);
  if (!joined) return failed(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(*capture->graph));
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **, const cudaGraphEdgeData **,
                                         size_t *) {
  Stream &stream = stream_of(handle);
  Lock held(lock());
  Capture *capture = stream.capture.get();
  *status = !capture            ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  if (capture && id) *id = capture->id;
  if (capture && graph) *graph = reinterpret_cast<cudaGraph_t>(capture->graph.get());
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
  if (nodes) return failed(cudaErrorNotSupported);
  *number = graph_of(graph).nodes.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(graph_of(graph)));
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete &graph_of(graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete &graph_of(graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  if (auto error = refuse_while_capturing(stream_of(stream))) return error;  // a graph within a graph: not emulated
  count(Count::LAUNCHES, 1);
  Graph &graph = graph_of(handle);
  for (int node : some_order(graph)) push(stream_of(stream), graph.nodes[node].make());
  return cudaSuccess;
}
