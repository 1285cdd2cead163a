// Written out with operators that are redirected themselves, in fp32 where the CUDA kernel accumulates in fp32.
#include "kernels.h"

#include <ATen/ATen.h>
#include <torch/version.h>
#include <cmath>

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeInt = std::optional<c10::SymInt>;
using MaybeScale = std::optional<double>;

namespace device {
namespace {

double scale_of(const MaybeScale &scale, const Tensor &q) { return scale.value_or(1 / std::sqrt(double(q.size(-1)))); }
Tensor no_seed(const Tensor &like) { return at::zeros({}, like.options().dtype(at::kLong)); }
Tensor fp32(const Tensor &t) { return t.to(at::kFloat); }

// ---- Attention of [batch, heads, tokens, width]: torch's flash, efficient and cuDNN kernels, without dropout

Tensor repeat_heads(const Tensor &k, const Tensor &q) {
  return k.size(1) == q.size(1) ? k : k.repeat_interleave(q.size(1) / k.size(1), 1);
}
Tensor sum_heads(const Tensor &gradient, const Tensor &k) {
  if (gradient.size(1) == k.size(1)) return gradient;
  return gradient.view({gradient.size(0), k.size(1), -1, gradient.size(2), gradient.size(3)}).sum(2);
}

Tensor scores(const Tensor &q, const Tensor &k, const MaybeTensor &bias, bool causal, const MaybeScale &scale) {
  Tensor found = at::matmul(fp32(q), fp32(k).transpose(-1, -2)) * scale_of(scale, q);
  if (bias && bias->defined()) found = found + fp32(*bias);
  if (!causal) return found;
  auto later = at::ones({q.size(-2), k.size(-2)}, q.options().dtype(at::kBool)).triu(1);
  return found.masked_fill(later, -INFINITY);
}

struct Attended {
  Tensor output, logsumexp;
};
Attended attend(const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &bias, double dropout, bool causal,
                const MaybeScale &scale) {
  TORCH_CHECK(dropout == 0, "emulated CUDA device: fused attention with dropout");
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor s = scores(q, repeat_heads(k, q), bias, causal, scale);
  Tensor output = at::matmul(at::softmax(s, -1), fp32(repeat_heads(v, q))).to(q.scalar_type());
  return {output.transpose(1, 2).contiguous().transpose(1, 2), at::logsumexp(s, -1)};  // in memory as the kernels'
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
Gradients attend_backward(const Tensor &gradient, const Tensor &q, const Tensor &k_, const Tensor &v_,
                          const MaybeTensor &bias, const Tensor &output, const Tensor &logsumexp, bool causal,
                          const MaybeScale &scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor k = repeat_heads(k_, q), v = repeat_heads(v_, q), g = fp32(gradient);
  Tensor rows = logsumexp.slice(-1, 0, q.size(-2)).unsqueeze(-1);
  Tensor p = (scores(q, k, bias, causal, scale) - rows).exp();
  Tensor gp = at::matmul(g, fp32(v).transpose(-1, -2));
  Tensor gs = p * (gp - (g * fp32(output)).sum(-1, true));
  Tensor gq = at::matmul(gs, fp32(k)) * scale_of(scale, q);
  Tensor gk = at::matmul(gs.transpose(-1, -2), fp32(q)) * scale_of(scale, q);
  Tensor gv = at::matmul(p.transpose(-1, -2), g), gb;
  if (bias && bias->defined()) gb = gs.sum_to_size(bias->sizes()).to(bias->scalar_type());
  return {gq.to(q.scalar_type()), sum_heads(gk, k_).to(k.scalar_type()), sum_heads(gv, v_).to(v.scalar_type()), gb};
}

// The schemas of native_functions.yaml.
Gradients efficient(const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &bias, bool, double dropout,
                    bool causal, MaybeScale scale) {
  auto [output, logsumexp] = attend(q, k, v, bias, dropout, causal, scale);
  return {output, logsumexp, no_seed(q), no_seed(q)};
}
Gradients efficient_backward(const Tensor &g, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &bias,
                             const Tensor &output, const Tensor &logsumexp, const Tensor &, const Tensor &, double,
                             std::array<bool, 4>, bool causal, MaybeScale scale) {
  return attend_backward(g, q, k, v, bias, output, logsumexp, causal, scale);
}
using Flash = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
Flash cudnn(const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &bias, bool, double dropout, bool causal,
            bool, MaybeScale scale) {
  auto [output, logsumexp] = attend(q, k, v, bias, dropout, causal, scale);
  return {output,      logsumexp, Tensor(), Tensor(), q.size(2), k.size(2), no_seed(q), no_seed(q), at::empty({0}, q.options())};
}
Flash flash(const Tensor &q, const Tensor &k, const Tensor &v, double dropout, bool causal, bool, MaybeScale scale) {
  return cudnn(q, k, v, {}, false, dropout, causal, false, scale);
}
using Three = std::tuple<Tensor, Tensor, Tensor>;
Three cudnn_backward(const Tensor &g, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &output,
                     const Tensor &logsumexp, const Tensor &, const Tensor &, const Tensor &bias, const Tensor &,
                     const Tensor &, c10::SymInt, c10::SymInt, double, bool causal, MaybeScale scale) {
  auto [gq, gk, gv, _] = attend_backward(g, q, k, v, bias, output, logsumexp, causal, scale);
  return {gq, gk, gv};
}
Three flash_backward(const Tensor &g, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &output,
                     const Tensor &logsumexp, const Tensor &, const Tensor &, c10::SymInt, c10::SymInt, double,
                     bool causal, const Tensor &, const Tensor &, MaybeScale scale) {
  auto [gq, gk, gv, _] = attend_backward(g, q, k, v, {}, output, logsumexp, causal, scale);
  return {gq, gk, gv};
}
int64_t sdp_choice(const Tensor &, const Tensor &, const Tensor &, const MaybeTensor &, double, bool, MaybeScale, bool) {
  return 0;  // math
}

// ---- Flash attention over rows of unequal lengths (torch.nn.attention.varlen), on the CPU: q [tokens, heads, width],
// k and v [tokens, groups, width], causal at the lower right, with a window

struct Document {
  int64_t first_q, last_q, first_k, last_k;
  Tensor q, k, v, scores;  // [heads, tokens, ...], fp32
};
struct Window {
  int64_t left, right;  // tokens; -1: all
};
Window window_of(bool causal, const MaybeInt &left, const MaybeInt &right) {
  return {left ? left->expect_int() : -1, causal ? 0 : right ? right->expect_int() : -1};
}

Document document(int64_t i, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &starts_q,
                  const Tensor &starts_k, const Window &window, const MaybeScale &scale) {
  const int *of_q = starts_q.const_data_ptr<int>(), *of_k = starts_k.const_data_ptr<int>();
  Document d{of_q[i], of_q[i + 1], of_k[i], of_k[i + 1]};
  auto part = [](const Tensor &t, int64_t first, int64_t last, int64_t repeat) {
    return fp32(t.slice(0, first, last)).transpose(0, 1).repeat_interleave(repeat, 0);
  };
  int64_t queries_a_key = q.size(1) / k.size(1), queries = d.last_q - d.first_q, keys = d.last_k - d.first_k;
  d.q = part(q, d.first_q, d.last_q, 1);
  d.k = part(k, d.first_k, d.last_k, queries_a_key);
  d.v = part(v, d.first_k, d.last_k, queries_a_key);
  Tensor at = at::arange(queries).unsqueeze(1) + (keys - queries), key = at::arange(keys).unsqueeze(0);
  Tensor hidden = at::zeros({queries, keys}, at::kBool);
  if (window.right >= 0) hidden = hidden | (key > at + window.right);
  if (window.left >= 0) hidden = hidden | (key < at - window.left);
  d.scores = (at::matmul(d.q, d.k.transpose(-1, -2)) * scale_of(scale, q)).masked_fill(hidden, -INFINITY);
  return d;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rows(
    const Tensor &q, const Tensor &k, const Tensor &v, const MaybeTensor &starts_q, const MaybeTensor &starts_k,
    c10::SymInt, c10::SymInt, double dropout, bool causal, bool, MaybeScale scale, MaybeInt left, MaybeInt right,
    const MaybeTensor &, const MaybeTensor &
#if TORCH_VERSION_MINOR >= 13
    , const MaybeTensor &, std::optional<int64_t>
#endif
) {
  bool known = dropout == 0 && starts_q && starts_q->defined() && q.dim() == 3;
  TORCH_CHECK(known, "emulated CUDA device: _flash_attention_forward with dropout or without rows");
  Tensor output = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
  Tensor logsumexp = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
  Window window = window_of(causal, left, right);
  for (int64_t i = 0; i + 1 < starts_q->size(0); i++) {
    auto d = document(i, q, k, v, *starts_q, *starts_k, window, scale);
    output.slice(0, d.first_q, d.last_q).copy_(at::matmul(at::softmax(d.scores, -1), d.v).transpose(0, 1));
    logsumexp.slice(1, d.first_q, d.last_q).copy_(at::logsumexp(d.scores, -1));
  }
  Tensor seed = at::zeros({2}, q.options().dtype(at::kLong));
  return {output, logsumexp, seed, no_seed(q), at::empty({0}, q.options())};
}

Three rows_backward(const Tensor &gradient, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &output,
                    const Tensor &logsumexp, const Tensor &starts_q, const Tensor &starts_k, c10::SymInt, c10::SymInt,
                    double, bool causal, const Tensor &, const Tensor &, MaybeScale scale, MaybeInt left, MaybeInt right) {
  Tensor gq = at::empty_like(q), gk = at::empty_like(k), gv = at::empty_like(v);
  Window window = window_of(causal, left, right);
  auto fold = [&](const Tensor &t) {  // the heads that share a key
    return t.view({k.size(1), -1, t.size(1), t.size(2)}).sum(1).transpose(0, 1);
  };
  for (int64_t i = 0; i + 1 < starts_q.size(0); i++) {
    auto d = document(i, q, k, v, starts_q, starts_k, window, scale);
    auto own = [&](const Tensor &t) { return fp32(t.slice(0, d.first_q, d.last_q)).transpose(0, 1); };
    Tensor g = own(gradient), p = (d.scores - logsumexp.slice(1, d.first_q, d.last_q).unsqueeze(-1)).exp();
    Tensor gs = p * (at::matmul(g, d.v.transpose(-1, -2)) - (g * own(output)).sum(-1, true)) * scale_of(scale, q);
    gq.slice(0, d.first_q, d.last_q).copy_(at::matmul(gs, d.k).transpose(0, 1));
    gk.slice(0, d.first_k, d.last_k).copy_(fold(at::matmul(gs.transpose(-1, -2), d.q)));
    gv.slice(0, d.first_k, d.last_k).copy_(fold(at::matmul(p.transpose(-1, -2), g)));
  }
  return {gq, gk, gv};
}

// ---- Others

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &gradient, const Tensor &x, at::IntArrayRef shape,
                                             const Tensor &rstd, const MaybeTensor &weight, std::array<bool, 2>) {
  std::vector<int64_t> inner, outer;
  for (int64_t dim = 0; dim < x.dim(); dim++) (dim < x.dim() - int64_t(shape.size()) ? outer : inner).push_back(dim);
  bool weighted = weight && weight->defined();
  Tensor g = fp32(gradient), normal = fp32(x) * rstd, gn = weighted ? g * fp32(*weight) : g, gw;
  if (weighted) gw = (outer.empty() ? g * normal : (g * normal).sum(outer)).to(weight->scalar_type());
  return {((gn - normal * (gn * normal).mean(inner, true)) * rstd).to(x.scalar_type()), gw};
}

// It has no generator argument: with the CPU's kernel it would draw from the CPU's generator.
std::tuple<Tensor, Tensor> dropout(const Tensor &x, double p, std::optional<bool> train) {
  if (p == 0 || !x.numel() || (train && !*train)) return {x.clone(), at::ones(x.sizes(), x.options().dtype(at::kBool))};
  Tensor mask = at::empty(x.sizes(), x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x * mask * (p == 1 ? 0. : 1 / (1 - p)), mask};
}
Tensor masked_scale(const Tensor &x, const Tensor &mask, double scale) { return x * mask * scale; }
Tensor mm_as(const Tensor &a, const Tensor &b, at::ScalarType type) { return at::mm(a.to(type), b.to(type)); }
Tensor bmm_as(const Tensor &a, const Tensor &b, at::ScalarType type) { return at::bmm(a.to(type), b.to(type)); }
Tensor &mm_out(const Tensor &a, const Tensor &b, at::ScalarType type, Tensor &out) { return out.copy_(mm_as(a, b, type)); }

}  // namespace

std::set<std::string> register_kernels(torch::Library &cuda, torch::Library &cpu) {
  // Called with CUDA tensors they would read device memory in the midst of a queue: as CPU kernels they are queued.
  cpu.impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
  cpu.impl("_flash_attention_forward", TORCH_FN(rows));
  cpu.impl("_flash_attention_backward", TORCH_FN(rows_backward));
  std::set<std::string> written;
  auto on_cuda = [&](const char *name, auto kernel) {
    cuda.impl(name, kernel);
    written.insert(std::string("aten::") + name);
  };
  on_cuda("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  on_cuda("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  on_cuda("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  on_cuda("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  on_cuda("_scaled_dot_product_cudnn_attention", TORCH_FN(cudnn));
  on_cuda("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(cudnn_backward));
  on_cuda("_fused_sdp_choice", TORCH_FN(sdp_choice));
  on_cuda("native_dropout", TORCH_FN(dropout));
  on_cuda("_masked_scale", TORCH_FN(masked_scale));
  on_cuda("mm.dtype", TORCH_FN(mm_as));
  on_cuda("mm.dtype_out", TORCH_FN(mm_out));
  on_cuda("bmm.dtype", TORCH_FN(bmm_as));
  return written;
}

}  // namespace device
