// Paddle operators over the kernels: forward and gradient, float32 in NCHW on a CPU.
#include <omp.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "paddle/common/ddim.h"
#include "paddle/phi/api/all.h"

// Of the MKL that Paddle brings along.
extern "C" void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float* a, int lda,
                            const float* b, int ldb, float beta, float* c, int ldc);

namespace ppfleet {
namespace {

using paddle::Tensor;
using Tensors = std::vector<Tensor>;

const Kernels& kernels() {
#if defined(__x86_64__)
  static const bool modern = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             std::getenv("PPFLEET_PORTABLE") == nullptr;
  return modern ? kAvx2 : kPortable;
#else
  return kPortable;
#endif
}

// c = a b + beta c, of rows; t* says which of a and b are given transposed.
void product(bool ta, bool tb, int m, int n, int k, const float* a, int lda, const float* b, int ldb, float beta,
             float* c, int ldc) {
  cblas_sgemm(101, ta ? 112 : 111, tb ? 112 : 111, m, n, k, 1.0f, a, lda, b, ldb, beta, c, ldc);
}

Tensor floats(std::vector<int64_t> shape) { return paddle::empty(shape, paddle::DataType::FLOAT32, paddle::CPUPlace()); }

// The checks that keep a kernel from reading or writing past the end of a tensor. swap.py leaves what does not fit to
// Paddle's own layers, so they fail only where an operator is called directly.

bool is_contiguous(const Tensor& t) {
  const auto shape = t.shape();
  const auto& strides = t.strides();
  int64_t step = 1;
  for (int i = static_cast<int>(shape.size()) - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

void expect(const Tensor& t, const std::vector<int64_t>& shape, const char* name) {
  PD_CHECK(t.initialized() && t.is_dense_tensor() && t.is_cpu() && t.dtype() == paddle::DataType::FLOAT32 &&
               is_contiguous(t),
           "ppfleet: ", name, " must be a contiguous float32 tensor on the CPU");
  PD_CHECK(t.shape() == shape, "ppfleet: ", name, " has ", t.numel(), " elements in ", t.shape().size(),
           " dimensions, which do not fit the other inputs");
}

constexpr int64_t kMost = 1 << 30;  // elements: the kernels count in 32 bits, borders and rounding up included

void expect_countable(int64_t a, int64_t b, int64_t c, int64_t d) {
  int64_t count = 1;
  for (const int64_t side : {a, b, c, d}) {
    PD_CHECK(side > 0 && side <= kMost, "ppfleet: a tensor is empty or too large");
    count *= side;
    PD_CHECK(count <= kMost, "ppfleet: a tensor is too large");
  }
}

Shape shape_of(const Tensor& x) {
  const auto d = x.shape();
  PD_CHECK(d.size() == 4, "ppfleet: images must have 4 dimensions, got ", d.size());
  expect_countable(d[0], d[1], d[2], d[3]);
  expect(x, d, "X");
  return {static_cast<int>(d[0]), static_cast<int>(d[1]), static_cast<int>(d[2]), static_cast<int>(d[3])};
}

enum Kind { kDense, kDepthwise };

Shape convolved(const Tensor& x, const Tensor& w, int stride, int padding, Kind kind) {
  Shape s = shape_of(x);
  const auto d = w.shape();
  PD_CHECK(d.size() == 4 && d[0] > 0 && d[2] == d[3], "ppfleet: W must have 4 dimensions and a square kernel");
  expect_countable(d[0], d[1], d[2], d[3]);
  if (kind == kDepthwise) {
    PD_CHECK(d[2] == 3 || d[2] == 5, "ppfleet: a depthwise kernel must be 3 or 5 wide, got ", d[2]);
    expect(w, {s.channels, 1, d[2], d[2]}, "W");
  } else {
    expect(w, {d[0], s.channels, d[2], d[2]}, "W");
  }
  s.kernel = static_cast<int>(d[2]);
  s.stride = stride;
  s.padding = padding;
  PD_CHECK((stride == 1 || stride == 2) && padding >= 0 && padding < s.kernel,
           "ppfleet: stride must be 1 or 2, padding less than the kernel, got ", stride, " and ", padding);
  PD_CHECK(s.height + 2 * padding >= s.kernel && s.width + 2 * padding >= s.kernel,
           "ppfleet: the kernel is larger than the padded images");
  s.out_height = (s.height + 2 * padding - s.kernel) / stride + 1;
  s.out_width = (s.width + 2 * padding - s.kernel) / stride + 1;
  expect_countable(s.batch, d[0], s.out_height, s.out_width);
  expect_countable(d[1], d[2], d[3], s.out_width);
  return s;
}

Shape convolved_by_pixel(const Tensor& x, const Tensor& w) {
  const Shape s = convolved(x, w, 1, 0, kDense);
  PD_CHECK(s.kernel == 1, "ppfleet: the kernel must be 1 wide, got ", s.kernel);
  return s;
}

// Depthwise convolution

Tensors depthwise(const Tensor& x, const Tensor& w, int stride, int padding) {
  const Shape s = convolved(x, w, stride, padding, kDepthwise);
  Tensor y = floats({s.batch, s.channels, s.out_height, s.out_width});
  kernels().depthwise(s, x.data<float>(), w.data<float>(), y.data<float>(), nullptr, nullptr);
  return {y};
}

Tensors depthwise_grad(const Tensor& x, const Tensor& w, const Tensor& dy, int stride, int padding) {
  const Shape s = convolved(x, w, stride, padding, kDepthwise);
  expect(dy, {s.batch, s.channels, s.out_height, s.out_width}, "the gradient of Y");
  Tensor dx = floats(x.shape()), dw = floats(w.shape());
  kernels().depthwise_grad(s, x.data<float>(), w.data<float>(), nullptr, nullptr, dy.data<float>(), dx.data<float>(),
                           dw.data<float>(), nullptr, nullptr);
  return {dx, dw};
}

// Convolution with 1 x 1 kernels: a matrix product an image. Where images are small, one product for all of them, for
// which they are laid out by channel, all images in a row.

constexpr int kSmall = 64;  // pixels

using Floats = std::unique_ptr<float[]>;
Floats scratch(int64_t count) { return Floats(new float[count]); }

// Share number `own` of `count` things among `threads`: where it begins, and how many they are.
struct Share {
  explicit Share(int64_t count)
      : begin(static_cast<int>(count * omp_get_thread_num() / omp_get_num_threads())),
        size(static_cast<int>(count * (omp_get_thread_num() + 1) / omp_get_num_threads()) - begin) {}
  int begin, size;
};

// y = w x, or w transposed times x, of `columns` columns.
void mix_rows(const float* w, bool turned, const float* x, int in, int out, int columns, float* y) {
#pragma omp parallel
  {
    const Share own(out);
    if (own.size > 0)
      product(turned, false, own.size, columns, in, w + (turned ? own.begin : int64_t{own.begin} * in),
              turned ? out : in, x, columns, 0, y + int64_t{own.begin} * columns, columns);
  }
}

// y[n] = w x[n], or w transposed, for images of `in` and `out` planes.
void mix(const float* w, bool turned, const float* x, int batch, int in, int out, int size, float* y) {
  if (size >= kSmall) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < batch; ++n)
      product(turned, false, out, size, in, w, turned ? out : in, x + int64_t{n} * in * size, size, 0,
              y + int64_t{n} * out * size, size);
    return;
  }
  const Floats rows = scratch(int64_t{in} * batch * size), made = scratch(int64_t{out} * batch * size);
  kernels().gather(x, batch, in, size, rows.get());
  mix_rows(w, turned, rows.get(), in, out, batch * size, made.get());
  kernels().scatter(made.get(), batch, out, size, y);
}

// dw = the sum of dy[n] times x[n] transposed
void mix_grad(const float* dy, const float* x, int batch, int in, int out, int size, float* dw) {
#pragma omp parallel
  {
    const Share own(out);
    if (own.size > 0)
      for (int n = 0; n < batch; ++n)
        product(false, true, own.size, in, size, dy + (int64_t{n} * out + own.begin) * size, size,
                x + int64_t{n} * in * size, size, n > 0, dw + int64_t{own.begin} * in, in);
  }
}

Tensors pointwise(const Tensor& x, const Tensor& w) {
  const Shape s = convolved_by_pixel(x, w);
  const int out = static_cast<int>(w.shape()[0]);
  Tensor y = floats({s.batch, out, s.height, s.width});
  mix(w.data<float>(), false, x.data<float>(), s.batch, s.channels, out, s.height * s.width, y.data<float>());
  return {y};
}

Tensors pointwise_grad(const Tensor& x, const Tensor& w, const Tensor& dy) {
  const Shape s = convolved_by_pixel(x, w);
  const int out = static_cast<int>(w.shape()[0]), size = s.height * s.width;
  expect(dy, {s.batch, out, s.height, s.width}, "the gradient of Y");
  Tensor dx = floats(x.shape()), dw = floats(w.shape());
  mix(w.data<float>(), true, dy.data<float>(), s.batch, out, s.channels, size, dx.data<float>());
  if (size >= kSmall) {
    mix_grad(dy.data<float>(), x.data<float>(), s.batch, s.channels, out, size, dw.data<float>());
  } else {
    const Floats rows = scratch(x.numel()), gradients = scratch(dy.numel());
    kernels().gather(x.data<float>(), s.batch, s.channels, size, rows.get());
    kernels().gather(dy.data<float>(), s.batch, out, size, gradients.get());
    mix_grad(gradients.get(), rows.get(), 1, s.channels, out, s.batch * size, dw.data<float>());
  }
  return {dx, dw};
}

// BatchNorm with the activation after it, whose input is computed again for the gradient instead of kept

BatchNorm parts(Tensor* kept, int channels, int act, bool batch_statistics) {
  expect(*kept, {4, channels}, "Kept");
  PD_CHECK(act >= kNone && act <= kHardswish, "ppfleet: unknown activation ", act);
  BatchNorm p{};
  p.act = static_cast<Act>(act);
  p.batch_statistics = batch_statistics;
  p.a = kept->data<float>();
  p.b = p.a + channels;
  p.mean = p.b + channels;
  p.sharp = p.mean + channels;
  return p;
}

BatchNorm parts(Tensor* kept, int channels, const Tensor& scale, const Tensor& bias, const Tensor& mean,
                const Tensor& variance, float momentum, float epsilon, int act, bool batch_statistics) {
  expect(scale, {channels}, "Scale");
  expect(bias, {channels}, "Bias");
  expect(mean, {channels}, "Mean");
  expect(variance, {channels}, "Variance");
  BatchNorm p = parts(kept, channels, act, batch_statistics);
  p.momentum = momentum;
  p.epsilon = epsilon;
  p.scale = scale.data<float>();
  p.bias = bias.data<float>();
  // The running statistics are updated where they are, as Paddle's own operator does.
  p.running_mean = const_cast<float*>(mean.data<float>());
  p.running_variance = const_cast<float*>(variance.data<float>());
  return p;
}

Tensors batch_norm(const Tensor& x, const Tensor& scale, const Tensor& bias, const Tensor& mean,
                   const Tensor& variance, float momentum, float epsilon, int act, bool batch_statistics) {
  const Shape s = shape_of(x);
  Tensor y = floats(x.shape()), kept = floats({4, s.channels});
  const BatchNorm p =
      parts(&kept, s.channels, scale, bias, mean, variance, momentum, epsilon, act, batch_statistics);
  kernels().batch_norm(s, p, x.data<float>(), y.data<float>());
  return {y, kept};
}

Tensors batch_norm_grad(const Tensor& x, const Tensor& kept, const Tensor& dy, int act, bool batch_statistics) {
  const Shape s = shape_of(x);
  expect(dy, x.shape(), "the gradient of Y");
  Tensor dx = floats(x.shape()), dscale = floats({s.channels}), dbias = floats({s.channels}), same = kept;
  kernels().batch_norm_grad(s, parts(&same, s.channels, act, batch_statistics), x.data<float>(), dy.data<float>(),
                            dx.data<float>(), dscale.data<float>(), dbias.data<float>());
  return {dx, dscale, dbias};
}

// A convolution and the BatchNorm after it, which takes what it can while an image or a plane is in the cache

// Over the images that a convolution makes: the moments of each when it is there, and all the rest when all are.
class NormAfter {
 public:
  NormAfter(const BatchNorm& norm, int batch, int channels, int size, const float* z)
      : p(norm), batch(batch), channels(channels), size(size), z(z), moments(int64_t{batch} * channels) {}

  void made(int n) {
    if (!p.batch_statistics) return;
    for (int64_t at = int64_t{n} * channels; at < int64_t{n + 1} * channels; ++at)
      moments[at] = kernels().moments(size, z + at * size);
  }

  void finish(float* y) const {
    for (int c = 0; c < channels; ++c) kernels().settle(p, c, batch, size, &moments[c], channels);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < batch; ++i)
      for (int c = 0; c < channels; ++c) {
        const int64_t at = (int64_t{batch - 1 - i} * channels + c) * size;  // the last ones are nearest
        kernels().norm_plane(p, c, size, z + at, y + at);
      }
  }

 private:
  const BatchNorm& p;
  int batch, channels, size;
  const float* z;
  std::vector<Moments> moments;
};

// For the gradient, by channel.
std::vector<Line> lines_of(const BatchNorm& p, int batch, int channels, int size, const float* z, const float* dy,
                           float* dscale, float* dbias) {
  std::vector<Line> lines(channels);
#pragma omp parallel for schedule(static)
  for (int c = 0; c < channels; ++c)
    lines[c] = kernels().norm_sums(p, c, batch, size, int64_t{channels} * size, z + int64_t{c} * size,
                                   dy + int64_t{c} * size, dscale, dbias);
  return lines;
}

// sum = that of `parts` arrays, always in the same order
void add_up(const float* each, int parts, int64_t count, float* sum) {
  std::memcpy(sum, each, sizeof(float) * count);
  for (int part = 1; part < parts; ++part)
    for (int64_t i = 0; i < count; ++i) sum[i] += each[part * count + i];
}

constexpr int kParts = 16;  // gradients of weights are added up in so many parts: the same bits on any number of cores

bool is_depthwise(const Tensor& w) { return w.shape().size() == 4 && w.shape()[2] > 1; }

Shape convolved_before_norm(const Tensor& x, const Tensor& w, int stride, int padding) {
  if (is_depthwise(w)) return convolved(x, w, stride, padding, kDepthwise);
  PD_CHECK(stride == 1 && padding == 0, "ppfleet: a 1 x 1 convolution must have stride 1 and no padding");
  return convolved_by_pixel(x, w);
}

void pointwise_norm(const Shape& s, int out, const BatchNorm& p, const float* x, const float* w, float* z, float* y) {
  const int size = s.height * s.width;
  NormAfter norm(p, s.batch, out, size, z);
#pragma omp parallel for schedule(static)
  for (int n = 0; n < s.batch; ++n) {
    product(false, false, out, size, s.channels, w, s.channels, x + int64_t{n} * s.channels * size, size, 0,
            z + int64_t{n} * out * size, size);
    norm.made(n);
  }
  norm.finish(y);
}

void pointwise_norm_grad(const Shape& s, int out, const BatchNorm& p, const float* x, const float* w, const float* z,
                         const float* dy, float* dx, float* dw, float* dscale, float* dbias) {
  const int in = s.channels, size = s.height * s.width, parts = s.batch < kParts ? s.batch : kParts;
  const std::vector<Line> lines = lines_of(p, s.batch, out, size, z, dy, dscale, dbias);
  const Floats each = scratch(int64_t{parts} * out * in);
#pragma omp parallel
  {
    const Floats before = scratch(int64_t{out} * size);  // an image's gradient before the BatchNorm
#pragma omp for schedule(static)
    for (int part = 0; part < parts; ++part) {
      const int64_t batch = s.batch, first = batch * part / parts, end = batch * (part + 1) / parts;
      for (int64_t n = first; n < end; ++n) {
        for (int c = 0; c < out; ++c) {
          const int64_t at = (n * out + c) * size;
          kernels().norm_plane_grad(p, c, lines[c], size, z + at, dy + at, before.get() + int64_t{c} * size);
        }
        product(true, false, in, size, out, w, in, before.get(), size, 0, dx + n * in * size, size);
        product(false, true, out, in, size, before.get(), size, x + n * in * size, size, n > first,
                each.get() + int64_t{part} * out * in, in);
      }
    }
  }
  add_up(each.get(), parts, int64_t{out} * in, dw);
}

Tensors convolution_norm(const Tensor& x, const Tensor& w, const Tensor& scale, const Tensor& bias, const Tensor& mean,
                         const Tensor& variance, int stride, int padding, float momentum, float epsilon, int act,
                         bool batch_statistics) {
  const Shape s = convolved_before_norm(x, w, stride, padding);
  const int size = s.height * s.width, out = static_cast<int>(w.shape()[0]), all = s.batch * size;
  Tensor y = floats({s.batch, out, s.out_height, s.out_width}), kept = floats({4, out});
  const BatchNorm p = parts(&kept, out, scale, bias, mean, variance, momentum, epsilon, act, batch_statistics);
  if (is_depthwise(w) || size >= kSmall) {
    Tensor z = floats(y.shape());
    if (is_depthwise(w))
      kernels().depthwise(s, x.data<float>(), w.data<float>(), z.data<float>(), &p, y.data<float>());
    else
      pointwise_norm(s, out, p, x.data<float>(), w.data<float>(), z.data<float>(), y.data<float>());
    return {y, z, kept};
  }
  // Small images: both in rows.
  Tensor z = floats({out, all});
  const Floats rows = scratch(x.numel()), made = scratch(y.numel());
  kernels().gather(x.data<float>(), s.batch, s.channels, size, rows.get());
  mix_rows(w.data<float>(), false, rows.get(), s.channels, out, all, z.data<float>());
  kernels().batch_norm({1, out, 1, all}, p, z.data<float>(), made.get());
  kernels().scatter(made.get(), s.batch, out, size, y.data<float>());
  return {y, z, kept};
}

Tensors convolution_norm_grad(const Tensor& x, const Tensor& w, const Tensor& z, const Tensor& kept, const Tensor& dy,
                              int stride, int padding, int act, bool batch_statistics) {
  const Shape s = convolved_before_norm(x, w, stride, padding);
  const int size = s.height * s.width, out = static_cast<int>(w.shape()[0]), all = s.batch * size;
  expect(dy, {s.batch, out, s.out_height, s.out_width}, "the gradient of Y");
  if (is_depthwise(w) || size >= kSmall)
    expect(z, dy.shape(), "Z");
  else
    expect(z, {out, all}, "Z");
  Tensor dx = floats(x.shape()), dw = floats(w.shape()), dscale = floats({out}), dbias = floats({out}), same = kept;
  const BatchNorm p = parts(&same, out, act, batch_statistics);
  if (is_depthwise(w)) {
    kernels().depthwise_grad(s, x.data<float>(), w.data<float>(), &p, z.data<float>(), dy.data<float>(),
                             dx.data<float>(), dw.data<float>(), dscale.data<float>(), dbias.data<float>());
    return {dx, dw, dscale, dbias};
  }
  if (size >= kSmall) {
    pointwise_norm_grad(s, out, p, x.data<float>(), w.data<float>(), z.data<float>(), dy.data<float>(),
                        dx.data<float>(), dw.data<float>(), dscale.data<float>(), dbias.data<float>());
    return {dx, dw, dscale, dbias};
  }
  const Floats rows = scratch(x.numel()), gradients = scratch(dy.numel());
  kernels().gather(dy.data<float>(), s.batch, out, size, gradients.get());
  kernels().batch_norm_grad({1, out, 1, all}, p, z.data<float>(), gradients.get(), gradients.get(),
                            dscale.data<float>(), dbias.data<float>());
  kernels().gather(x.data<float>(), s.batch, s.channels, size, rows.get());
  mix_grad(gradients.get(), rows.get(), 1, s.channels, out, all, dw.data<float>());
  mix_rows(w.data<float>(), true, gradients.get(), out, s.channels, all, rows.get());
  kernels().scatter(rows.get(), s.batch, s.channels, size, dx.data<float>());
  return {dx, dw, dscale, dbias};
}

// Dense convolution of few channels, such as a network's first, and the BatchNorm after it if there is one. The images
// are the user's and need no gradient.

int rows_at_once(const Shape& s) {
  const int rows = 49152 / (s.channels * s.kernel * s.kernel * s.out_width);  // what a second-level cache holds
  return rows < 1 ? 1 : rows < s.out_height ? rows : s.out_height;
}

// f(image, first row, pixels, lines, room) for all images, some rows of the output at a time; there is `room` for
// `planes` planes of so many pixels.
template <typename F>
void each_block(const Shape& s, const float* x, int planes, F f) {
  const int block = rows_at_once(s), taps = s.channels * s.kernel * s.kernel;
  const int64_t size = int64_t{s.height} * s.width * s.channels;
#pragma omp parallel
  {
    std::vector<float> padded(kernels().padded_floats(s) * s.channels), lines(int64_t{taps} * block * s.out_width);
    const Floats room = scratch(int64_t{planes} * block * s.out_width);
#pragma omp for schedule(static)
    for (int n = 0; n < s.batch; ++n) {
      kernels().pad(s, x + n * size, padded.data());
      for (int row = 0; row < s.out_height; row += block) {
        const int rows = row + block <= s.out_height ? block : s.out_height - row;
        kernels().columns(s, padded.data(), row, rows, lines.data());
        f(n, row, rows * s.out_width, lines.data(), room.get());
      }
    }
  }
}

void stem_of(const Shape& s, int out, const float* x, const float* w, float* z, const BatchNorm* p, float* y) {
  const int taps = s.channels * s.kernel * s.kernel, made = s.out_height * s.out_width;
  std::unique_ptr<NormAfter> norm;
  if (p != nullptr) norm.reset(new NormAfter(*p, s.batch, out, made, z));
  each_block(s, x, 0, [&](int n, int row, int pixels, const float* lines, float*) {
    const int first = row * s.out_width;
    product(false, false, out, pixels, taps, w, taps, lines, pixels, 0, z + int64_t{n} * made * out + first, made);
    if (norm && first + pixels == made) norm->made(n);
  });
  if (norm) norm->finish(y);
}

void stem_grad_of(const Shape& s, int out, const float* x, const BatchNorm* p, const float* z, const float* dy,
                  float* dw, float* dscale, float* dbias) {
  const int taps = s.channels * s.kernel * s.kernel, made = s.out_height * s.out_width;
  std::vector<Line> of;
  if (p != nullptr) of = lines_of(*p, s.batch, out, made, z, dy, dscale, dbias);
  const Floats each = scratch(int64_t{s.batch} * out * taps);  // a gradient for each image, so that threads share none
  each_block(s, x, p == nullptr ? 0 : out, [&](int n, int row, int pixels, const float* lines, float* room) {
    const int64_t first = int64_t{n} * made * out + row * s.out_width;
    if (p != nullptr)
      for (int c = 0; c < out; ++c) {
        const int64_t at = first + int64_t{c} * made;
        kernels().norm_plane_grad(*p, c, of[c], pixels, z + at, dy + at, room + int64_t{c} * pixels);
      }
    product(false, true, out, taps, pixels, p == nullptr ? dy + first : room, p == nullptr ? made : pixels, lines,
            pixels, row > 0, each.get() + int64_t{n} * out * taps, taps);
  });
  add_up(each.get(), s.batch, int64_t{out} * taps, dw);
}

Tensors stem(const Tensor& x, const Tensor& w, int stride, int padding) {
  const Shape s = convolved(x, w, stride, padding, kDense);
  const int out = static_cast<int>(w.shape()[0]);
  Tensor y = floats({s.batch, out, s.out_height, s.out_width});
  stem_of(s, out, x.data<float>(), w.data<float>(), y.data<float>(), nullptr, nullptr);
  return {y};
}

Tensors stem_grad(const Tensor& x, const Tensor& w, const Tensor& dy, int stride, int padding) {
  const Shape s = convolved(x, w, stride, padding, kDense);
  expect(dy, {s.batch, w.shape()[0], s.out_height, s.out_width}, "the gradient of Y");
  Tensor dw = floats(w.shape());
  stem_grad_of(s, static_cast<int>(w.shape()[0]), x.data<float>(), nullptr, nullptr, dy.data<float>(),
               dw.data<float>(), nullptr, nullptr);
  return {dw};
}

Tensors stem_norm(const Tensor& x, const Tensor& w, const Tensor& scale, const Tensor& bias, const Tensor& mean,
                  const Tensor& variance, int stride, int padding, float momentum, float epsilon, int act,
                  bool batch_statistics) {
  const Shape s = convolved(x, w, stride, padding, kDense);
  const int out = static_cast<int>(w.shape()[0]);
  Tensor y = floats({s.batch, out, s.out_height, s.out_width}), z = floats(y.shape()), kept = floats({4, out});
  const BatchNorm p = parts(&kept, out, scale, bias, mean, variance, momentum, epsilon, act, batch_statistics);
  stem_of(s, out, x.data<float>(), w.data<float>(), z.data<float>(), &p, y.data<float>());
  return {y, z, kept};
}

Tensors stem_norm_grad(const Tensor& x, const Tensor& w, const Tensor& z, const Tensor& kept, const Tensor& dy,
                       int stride, int padding, int act, bool batch_statistics) {
  const Shape s = convolved(x, w, stride, padding, kDense);
  const int out = static_cast<int>(w.shape()[0]);
  expect(dy, {s.batch, out, s.out_height, s.out_width}, "the gradient of Y");
  expect(z, dy.shape(), "Z");
  Tensor dw = floats(w.shape()), dscale = floats({out}), dbias = floats({out}), same = kept;
  const BatchNorm p = parts(&same, out, act, batch_statistics);
  stem_grad_of(s, out, x.data<float>(), &p, z.data<float>(), dy.data<float>(), dw.data<float>(),
               dscale.data<float>(), dbias.data<float>());
  return {dw, dscale, dbias};
}

// Squeeze-excite: x times hardsigmoid(w2 relu(w1 means(x) + b1) + b2), a factor for each plane

void dense(const float* x, const float* w, const float* bias, int rows, int in, int out, float* y) {
  for (int n = 0; n < rows; ++n) std::memcpy(y + int64_t{n} * out, bias, sizeof(float) * out);
  product(false, true, rows, out, in, x, in, w, in, 1, y, out);
}

// How many values are between the two products.
int middle_of(const Shape& s, const Tensor& w1, const Tensor& w2) {
  const int64_t middle = w1.shape().empty() ? 0 : w1.shape()[0];
  expect_countable(s.batch, middle, 1, 1);
  expect(w1, {middle, s.channels, 1, 1}, "W1");
  expect(w2, {s.channels, middle, 1, 1}, "W2");
  return static_cast<int>(middle);
}

Tensors squeeze_excite(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2) {
  const Shape s = shape_of(x);
  const int middle = middle_of(s, w1, w2), size = s.height * s.width;
  expect(b1, {middle}, "B1");
  expect(b2, {s.channels}, "B2");
  const int64_t planes = int64_t{s.batch} * s.channels;
  Tensor y = floats(x.shape()), means = floats({s.batch, s.channels}), hidden = floats({s.batch, middle}),
         gate = floats({s.batch, s.channels});
  kernels().plane_means(planes, size, x.data<float>(), means.data<float>());
  float *h = hidden.data<float>(), *g = gate.data<float>();
  dense(means.data<float>(), w1.data<float>(), b1.data<float>(), s.batch, s.channels, middle, h);
  for (int i = 0; i < s.batch * middle; ++i) h[i] = h[i] < 0 ? 0 : h[i];
  dense(h, w2.data<float>(), b2.data<float>(), s.batch, middle, s.channels, g);
  for (int64_t i = 0; i < planes; ++i) {
    const float v = g[i] * (1.0f / 6) + 0.5f;
    g[i] = v < 0 ? 0 : v > 1 ? 1 : v;
  }
  kernels().scale(planes, size, x.data<float>(), g, y.data<float>());
  return {y, means, hidden, gate};
}

// The sum of each column.
void column_sums(const float* x, int rows, int columns, float* sums) {
  std::memcpy(sums, x, sizeof(float) * columns);
  for (int n = 1; n < rows; ++n)
    for (int c = 0; c < columns; ++c) sums[c] += x[int64_t{n} * columns + c];
}

Tensors squeeze_excite_grad(const Tensor& x, const Tensor& w1, const Tensor& w2, const Tensor& means,
                            const Tensor& hidden, const Tensor& gate, const Tensor& dy) {
  const Shape s = shape_of(x);
  const int middle = middle_of(s, w1, w2), channels = s.channels, size = s.height * s.width;
  expect(means, {s.batch, channels}, "Means");
  expect(hidden, {s.batch, middle}, "Hidden");
  expect(gate, {s.batch, channels}, "Gate");
  expect(dy, x.shape(), "the gradient of Y");
  const int64_t planes = int64_t{s.batch} * channels;
  Tensor dx = floats(x.shape()), dw1 = floats(w1.shape()), db1 = floats({middle}), dw2 = floats(w2.shape()),
         db2 = floats({channels});
  std::vector<float> dgate(planes), dhidden(int64_t{s.batch} * middle), dmeans(planes);
  const float *g = gate.data<float>(), *h = hidden.data<float>();
  kernels().plane_products(planes, size, x.data<float>(), dy.data<float>(), dgate.data());
  for (int64_t i = 0; i < planes; ++i) dgate[i] *= g[i] > 0 && g[i] < 1 ? 1.0f / 6 : 0;
  product(true, false, channels, middle, s.batch, dgate.data(), channels, h, middle, 0, dw2.data<float>(), middle);
  column_sums(dgate.data(), s.batch, channels, db2.data<float>());
  product(false, false, s.batch, middle, channels, dgate.data(), channels, w2.data<float>(), middle, 0, dhidden.data(),
          middle);
  for (int i = 0; i < s.batch * middle; ++i) dhidden[i] *= h[i] > 0;
  product(true, false, middle, channels, s.batch, dhidden.data(), middle, means.data<float>(), channels, 0,
          dw1.data<float>(), channels);
  column_sums(dhidden.data(), s.batch, middle, db1.data<float>());
  product(false, false, s.batch, channels, middle, dhidden.data(), middle, w1.data<float>(), channels, 0,
          dmeans.data(), channels);
  for (float& value : dmeans) value /= static_cast<float>(size);
  kernels().scale_grad(planes, size, dy.data<float>(), g, dmeans.data(), dx.data<float>());
  return {dx, dw1, db1, dw2, db2};
}

// The mean of each plane

Tensors global_mean(const Tensor& x) {
  const Shape s = shape_of(x);
  Tensor y = floats({s.batch, s.channels, 1, 1});
  kernels().plane_means(int64_t{s.batch} * s.channels, s.height * s.width, x.data<float>(), y.data<float>());
  return {y};
}

Tensors global_mean_grad(const Tensor& x, const Tensor& dy) {
  const Shape s = shape_of(x);
  const int64_t size = int64_t{s.height} * s.width;
  expect(dy, {s.batch, s.channels, 1, 1}, "the gradient of Y");
  Tensor dx = floats(x.shape());
  const float* from = dy.data<float>();
  float* to = dx.data<float>();
  for (int64_t p = 0; p < int64_t{s.batch} * s.channels; ++p) {
    const float value = from[p] / static_cast<float>(size);
    for (int64_t i = 0; i < size; ++i) to[p * size + i] = value;
  }
  return {dx};
}

// Second-order gradients: of the gradient (dx, dw) by x, w and dy, in the directions ddx and ddw. An operator f that is
// linear in x and in w needs no kernels of its own for that. Paddle takes what they return for a constant, so a third
// order would be wrong without a word: `asked`, set by Python, says whether it is wanted.

constexpr char kInstead[] = ": pass fast_cpu=False to job.prepare";
bool (*asked)() = nullptr;

void expect_second_order_only() {
  PD_CHECK(asked == nullptr || !asked(),
           "ppfleet's fast CPU operators have no gradients of third order, which create_graph=True in a gradient of "
           "second order asks for", kInstead);
}

Tensor zeros(const Tensor& like) {
  return paddle::full(like.shape(), 0, paddle::DataType::FLOAT32, paddle::CPUPlace());
}

template <typename F, typename G>
Tensors bilinear_double_grad(const Tensor& x, const Tensor& w, const Tensor& dy, const Tensor& ddx,
                             const Tensor& ddw, F f, G grad) {
  expect_second_order_only();
  // A direction that nobody asked for is undefined.
  const Tensor along_x = ddx.initialized() ? ddx : zeros(x), along_w = ddw.initialized() ? ddw : zeros(w);
  const Tensors back = grad(along_x, along_w, dy);
  return {paddle::add(f(along_x, w)[0], f(x, along_w)[0]), back[0], back[1]};
}

Tensors depthwise_double_grad(const Tensor& x, const Tensor& w, const Tensor& dy, const Tensor& ddx,
                              const Tensor& ddw, int stride, int padding) {
  return bilinear_double_grad(
      x, w, dy, ddx, ddw, [&](const Tensor& x, const Tensor& w) { return depthwise(x, w, stride, padding); },
      [&](const Tensor& x, const Tensor& w, const Tensor& dy) { return depthwise_grad(x, w, dy, stride, padding); });
}

Tensors pointwise_double_grad(const Tensor& x, const Tensor& w, const Tensor& dy, const Tensor& ddx,
                              const Tensor& ddw) {
  return bilinear_double_grad(x, w, dy, ddx, ddw, pointwise, pointwise_grad);
}

// These gradients depend on dy alone; Paddle needs zeros for the other inputs all the same.

Tensors stem_double_grad(const Tensor& x, const Tensor& w, const Tensor& ddw, int stride, int padding) {
  expect_second_order_only();
  return {stem(x, ddw, stride, padding)[0], zeros(w)};
}

Tensors global_mean_double_grad(const Tensor& x, const Tensor& ddx) {
  expect_second_order_only();
  return {global_mean(ddx)[0], zeros(x)};
}

Tensors no_double_grad(const Tensor&) {
  PD_THROW("ppfleet's fast CPU operators have no second-order gradients of BatchNorm and squeeze-excite", kInstead);
}

// 1 if all numbers are finite, else 0

Tensors finite(const Tensors& all) {
  Tensor answer = floats({1});
  bool good = true;
  for (const Tensor& x : all) expect(x, x.shape(), "X");
  for (const Tensor& x : all) good = good && kernels().finite(x.numel(), x.data<float>());
  answer.data<float>()[0] = good;
  return {answer};
}

}  // namespace
}  // namespace ppfleet

// For threads that load images, and have no tensors: see pixels.py.
extern "C" bool ppfleet_planes(int64_t count, const uint8_t* pixels, const float* scale, const float* shift,
                               float* out) {
  const auto planes = ppfleet::kernels().planes;
  if (planes != nullptr) planes(count, pixels, scale, shift, out);
  return planes != nullptr;
}

// Who says whether gradients that are computed now shall have gradients themselves.
extern "C" void ppfleet_ask(bool (*question)()) { ppfleet::asked = question; }

using paddle::Grad;

PD_BUILD_OP(ppfleet_depthwise)
    .Inputs({"X", "W"})
    .Outputs({"Y"})
    .Attrs({"stride: int", "padding: int"})
    .SetKernelFn(PD_KERNEL(ppfleet::depthwise));
PD_BUILD_GRAD_OP(ppfleet_depthwise)
    .Inputs({"X", "W", Grad("Y")})
    .Outputs({Grad("X"), Grad("W")})
    .Attrs({"stride: int", "padding: int"})
    .SetKernelFn(PD_KERNEL(ppfleet::depthwise_grad));
PD_BUILD_DOUBLE_GRAD_OP(ppfleet_depthwise)
    .Inputs({"X", "W", Grad("Y"), Grad(Grad("X")), Grad(Grad("W"))})
    .Outputs({Grad(Grad("Y")), Grad("X"), Grad("W")})
    .Attrs({"stride: int", "padding: int"})
    .SetKernelFn(PD_KERNEL(ppfleet::depthwise_double_grad));

PD_BUILD_OP(ppfleet_pointwise).Inputs({"X", "W"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(ppfleet::pointwise));
PD_BUILD_GRAD_OP(ppfleet_pointwise)
    .Inputs({"X", "W", Grad("Y")})
    .Outputs({Grad("X"), Grad("W")})
    .SetKernelFn(PD_KERNEL(ppfleet::pointwise_grad));
PD_BUILD_DOUBLE_GRAD_OP(ppfleet_pointwise)
    .Inputs({"X", "W", Grad("Y"), Grad(Grad("X")), Grad(Grad("W"))})
    .Outputs({Grad(Grad("Y")), Grad("X"), Grad("W")})
    .SetKernelFn(PD_KERNEL(ppfleet::pointwise_double_grad));

PD_BUILD_OP(ppfleet_stem)
    .Inputs({"X", "W"})
    .Outputs({"Y"})
    .Attrs({"stride: int", "padding: int"})
    .SetKernelFn(PD_KERNEL(ppfleet::stem));
PD_BUILD_GRAD_OP(ppfleet_stem)
    .Inputs({"X", "W", Grad("Y")})
    .Outputs({Grad("W")})
    .Attrs({"stride: int", "padding: int"})
    .SetKernelFn(PD_KERNEL(ppfleet::stem_grad));
PD_BUILD_DOUBLE_GRAD_OP(ppfleet_stem)
    .Inputs({"X", "W", Grad(Grad("W"))})
    .Outputs({Grad(Grad("Y")), Grad("W")})
    .Attrs({"stride: int", "padding: int"})
    .SetKernelFn(PD_KERNEL(ppfleet::stem_double_grad));

PD_BUILD_OP(ppfleet_batch_norm)
    .Inputs({"X", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y", "Kept"})
    .Attrs({"momentum: float", "epsilon: float", "act: int", "batch_statistics: bool"})
    .SetKernelFn(PD_KERNEL(ppfleet::batch_norm));
PD_BUILD_GRAD_OP(ppfleet_batch_norm)
    .Inputs({"X", "Kept", Grad("Y")})
    .Outputs({Grad("X"), Grad("Scale"), Grad("Bias")})
    .Attrs({"act: int", "batch_statistics: bool"})
    .SetKernelFn(PD_KERNEL(ppfleet::batch_norm_grad));
PD_BUILD_DOUBLE_GRAD_OP(ppfleet_batch_norm)
    .Inputs({Grad("Y")})
    .Outputs({Grad(Grad("Y"))})
    .SetKernelFn(PD_KERNEL(ppfleet::no_double_grad));

PD_BUILD_OP(ppfleet_convolution_norm)
    .Inputs({"X", "W", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y", "Z", "Kept"})
    .Attrs({"stride: int", "padding: int", "momentum: float", "epsilon: float", "act: int", "batch_statistics: bool"})
    .SetKernelFn(PD_KERNEL(ppfleet::convolution_norm));
PD_BUILD_GRAD_OP(ppfleet_convolution_norm)
    .Inputs({"X", "W", "Z", "Kept", Grad("Y")})
    .Outputs({Grad("X"), Grad("W"), Grad("Scale"), Grad("Bias")})
    .Attrs({"stride: int", "padding: int", "act: int", "batch_statistics: bool"})
    .SetKernelFn(PD_KERNEL(ppfleet::convolution_norm_grad));
PD_BUILD_DOUBLE_GRAD_OP(ppfleet_convolution_norm)
    .Inputs({Grad("Y")})
    .Outputs({Grad(Grad("Y"))})
    .SetKernelFn(PD_KERNEL(ppfleet::no_double_grad));

PD_BUILD_OP(ppfleet_stem_norm)
    .Inputs({"X", "W", "Scale", "Bias", "Mean", "Variance"})
    .Outputs({"Y", "Z", "Kept"})
    .Attrs({"stride: int", "padding: int", "momentum: float", "epsilon: float", "act: int", "batch_statistics: bool"})
    .SetKernelFn(PD_KERNEL(ppfleet::stem_norm));
PD_BUILD_GRAD_OP(ppfleet_stem_norm)
    .Inputs({"X", "W", "Z", "Kept", Grad("Y")})
    .Outputs({Grad("W"), Grad("Scale"), Grad("Bias")})
    .Attrs({"stride: int", "padding: int", "act: int", "batch_statistics: bool"})
    .SetKernelFn(PD_KERNEL(ppfleet::stem_norm_grad));
PD_BUILD_DOUBLE_GRAD_OP(ppfleet_stem_norm)
    .Inputs({Grad("Y")})
    .Outputs({Grad(Grad("Y"))})
    .SetKernelFn(PD_KERNEL(ppfleet::no_double_grad));

PD_BUILD_OP(ppfleet_squeeze_excite)
    .Inputs({"X", "W1", "B1", "W2", "B2"})
    .Outputs({"Y", "Means", "Hidden", "Gate"})
    .SetKernelFn(PD_KERNEL(ppfleet::squeeze_excite));
PD_BUILD_GRAD_OP(ppfleet_squeeze_excite)
    .Inputs({"X", "W1", "W2", "Means", "Hidden", "Gate", Grad("Y")})
    .Outputs({Grad("X"), Grad("W1"), Grad("B1"), Grad("W2"), Grad("B2")})
    .SetKernelFn(PD_KERNEL(ppfleet::squeeze_excite_grad));
PD_BUILD_DOUBLE_GRAD_OP(ppfleet_squeeze_excite)
    .Inputs({Grad("Y")})
    .Outputs({Grad(Grad("Y"))})
    .SetKernelFn(PD_KERNEL(ppfleet::no_double_grad));

PD_BUILD_OP(ppfleet_global_mean).Inputs({"X"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(ppfleet::global_mean));
PD_BUILD_GRAD_OP(ppfleet_global_mean)
    .Inputs({"X", Grad("Y")})
    .Outputs({Grad("X")})
    .SetKernelFn(PD_KERNEL(ppfleet::global_mean_grad));
PD_BUILD_DOUBLE_GRAD_OP(ppfleet_global_mean)
    .Inputs({"X", Grad(Grad("X"))})
    .Outputs({Grad(Grad("Y")), Grad("X")})
    .SetKernelFn(PD_KERNEL(ppfleet::global_mean_double_grad));

PD_BUILD_OP(ppfleet_finite).Inputs({paddle::Vec("X")}).Outputs({"Answer"}).SetKernelFn(PD_KERNEL(ppfleet::finite));
