// Paddle operators over the kernels: forward and gradient, float32 in NCHW on a CPU.
#include <omp.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
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
  static const bool modern = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return modern && std::getenv("PPFLEET_PORTABLE") == nullptr ? kAvx2 : kPortable;
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

Shape shape_of(const Tensor& x) {
  const auto& d = x.shape();
  return {static_cast<int>(d[0]), static_cast<int>(d[1]), static_cast<int>(d[2]), static_cast<int>(d[3])};
}

Shape convolved(const Tensor& x, const Tensor& w, int stride, int padding) {
  Shape s = shape_of(x);
  s.kernel = static_cast<int>(w.shape()[2]);
  s.stride = stride;
  s.padding = padding;
  s.out_height = (s.height + 2 * padding - s.kernel) / stride + 1;
  s.out_width = (s.width + 2 * padding - s.kernel) / stride + 1;
  return s;
}

// Depthwise convolution

Tensors depthwise(const Tensor& x, const Tensor& w, int stride, int padding) {
  const Shape s = convolved(x, w, stride, padding);
  Tensor y = floats({s.batch, s.channels, s.out_height, s.out_width});
  kernels().depthwise(s, x.data<float>(), w.data<float>(), y.data<float>());
  return {y};
}

Tensors depthwise_grad(const Tensor& x, const Tensor& w, const Tensor& dy, int stride, int padding) {
  const Shape s = convolved(x, w, stride, padding);
  Tensor dx = floats(x.shape()), dw = floats(w.shape());
  kernels().depthwise_grad(s, x.data<float>(), w.data<float>(), dy.data<float>(), dx.data<float>(), dw.data<float>());
  return {dx, dw};
}

// Convolution with 1 x 1 kernels: a matrix product an image. Where images are small, one product for all of them, for
// which they are laid out by channel, all images in a row.

constexpr int kSmall = 64;  // pixels

using Floats = std::unique_ptr<float[]>;
Floats scratch(int64_t count) { return Floats(new float[count]); }

// Share number `own` of `count` things among `threads`: where it begins, and how many they are.
struct Share {
  explicit Share(int count)
      : begin(count * omp_get_thread_num() / omp_get_num_threads()),
        size(count * (omp_get_thread_num() + 1) / omp_get_num_threads() - begin) {}
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
  const Shape s = shape_of(x);
  const int out = static_cast<int>(w.shape()[0]);
  Tensor y = floats({s.batch, out, s.height, s.width});
  mix(w.data<float>(), false, x.data<float>(), s.batch, s.channels, out, s.height * s.width, y.data<float>());
  return {y};
}

Tensors pointwise_grad(const Tensor& x, const Tensor& w, const Tensor& dy) {
  const Shape s = shape_of(x);
  const int out = static_cast<int>(w.shape()[0]), size = s.height * s.width;
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

// Dense convolution of few channels, such as a network's first: the images are the user's and need no gradient

int rows_at_once(const Shape& s) {
  const int rows = 49152 / (s.channels * s.kernel * s.kernel * s.out_width);  // what a second-level cache holds
  return rows < 1 ? 1 : rows < s.out_height ? rows : s.out_height;
}

// f(image, first row, pixels, lines) for all images, some rows of the output at a time.
template <typename F>
void each_block(const Shape& s, const float* x, F f) {
  const int block = rows_at_once(s), taps = s.channels * s.kernel * s.kernel;
  const int64_t size = int64_t{s.height} * s.width * s.channels;
#pragma omp parallel
  {
    std::vector<float> padded(kernels().padded_floats(s) * s.channels), lines(int64_t{taps} * block * s.out_width);
#pragma omp for schedule(static)
    for (int n = 0; n < s.batch; ++n) {
      kernels().pad(s, x + n * size, padded.data());
      for (int row = 0; row < s.out_height; row += block) {
        const int rows = row + block <= s.out_height ? block : s.out_height - row;
        kernels().columns(s, padded.data(), row, rows, lines.data());
        f(n, row, rows * s.out_width, lines.data());
      }
    }
  }
}

Tensors stem(const Tensor& x, const Tensor& w, int stride, int padding) {
  const Shape s = convolved(x, w, stride, padding);
  const int out = static_cast<int>(w.shape()[0]), taps = s.channels * s.kernel * s.kernel;
  const int made = s.out_height * s.out_width;
  Tensor y = floats({s.batch, out, s.out_height, s.out_width});
  const float* weights = w.data<float>();
  float* to = y.data<float>();
  each_block(s, x.data<float>(), [=](int n, int row, int pixels, const float* lines) {
    product(false, false, out, pixels, taps, weights, taps, lines, pixels, 0,
            to + int64_t{n} * made * out + int64_t{row} * s.out_width, made);
  });
  return {y};
}

Tensors stem_grad(const Tensor& x, const Tensor& w, const Tensor& dy, int stride, int padding) {
  const Shape s = convolved(x, w, stride, padding);
  const int out = static_cast<int>(w.shape()[0]), taps = s.channels * s.kernel * s.kernel;
  const int made = s.out_height * s.out_width;
  Tensor dw = floats(w.shape());
  std::vector<float> each(int64_t{s.batch} * out * taps);  // a gradient for each image, so that threads share none
  const float* gradient = dy.data<float>();
  each_block(s, x.data<float>(), [&](int n, int row, int pixels, const float* lines) {
    product(false, true, out, taps, pixels, gradient + int64_t{n} * made * out + int64_t{row} * s.out_width, made,
            lines, pixels, row > 0, each.data() + int64_t{n} * out * taps, taps);
  });
  float* sum = dw.data<float>();
  std::memcpy(sum, each.data(), sizeof(float) * out * taps);
  for (int n = 1; n < s.batch; ++n)
    for (int i = 0; i < out * taps; ++i) sum[i] += each[int64_t{n} * out * taps + i];
  return {dw};
}

// BatchNorm with the activation after it, whose input is computed again for the gradient instead of kept

BatchNorm parts(Tensor* kept, int channels, int act, bool batch_statistics) {
  BatchNorm p{};
  p.act = static_cast<Act>(act);
  p.batch_statistics = batch_statistics;
  p.a = kept->data<float>();
  p.b = p.a + channels;
  p.mean = p.b + channels;
  p.sharp = p.mean + channels;
  return p;
}

BatchNorm parts(Tensor* kept, const Tensor& scale, const Tensor& bias, const Tensor& mean, const Tensor& variance,
                float momentum, float epsilon, int act, bool batch_statistics) {
  BatchNorm p = parts(kept, static_cast<int>(scale.numel()), act, batch_statistics);
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
  kernels().batch_norm(s, parts(&kept, scale, bias, mean, variance, momentum, epsilon, act, batch_statistics),
                       x.data<float>(), y.data<float>());
  return {y, kept};
}

Tensors batch_norm_grad(const Tensor& x, const Tensor& kept, const Tensor& dy, int act, bool batch_statistics) {
  const Shape s = shape_of(x);
  Tensor dx = floats(x.shape()), dscale = floats({s.channels}), dbias = floats({s.channels}), same = kept;
  kernels().batch_norm_grad(s, parts(&same, s.channels, act, batch_statistics), x.data<float>(), dy.data<float>(),
                            dx.data<float>(), dscale.data<float>(), dbias.data<float>());
  return {dx, dscale, dbias};
}

// A convolution and the BatchNorm after it

bool is_depthwise(const Tensor& w) { return w.shape()[2] > 1; }

Tensors convolution_norm(const Tensor& x, const Tensor& w, const Tensor& scale, const Tensor& bias, const Tensor& mean,
                         const Tensor& variance, int stride, int padding, float momentum, float epsilon, int act,
                         bool batch_statistics) {
  const Shape s = shape_of(x);
  const int size = s.height * s.width, out = static_cast<int>(w.shape()[0]), all = s.batch * size;
  if (is_depthwise(w) || size >= kSmall) {
    const Tensor z = is_depthwise(w) ? depthwise(x, w, stride, padding)[0] : pointwise(x, w)[0];
    const Tensors made = batch_norm(z, scale, bias, mean, variance, momentum, epsilon, act, batch_statistics);
    return {made[0], z, made[1]};
  }
  // Small images: both in rows.
  Tensor y = floats({s.batch, out, s.height, s.width}), z = floats({out, all}), kept = floats({4, out});
  const Floats rows = scratch(x.numel()), made = scratch(y.numel());
  kernels().gather(x.data<float>(), s.batch, s.channels, size, rows.get());
  mix_rows(w.data<float>(), false, rows.get(), s.channels, out, all, z.data<float>());
  kernels().batch_norm({1, out, 1, all},
                       parts(&kept, scale, bias, mean, variance, momentum, epsilon, act, batch_statistics),
                       z.data<float>(), made.get());
  kernels().scatter(made.get(), s.batch, out, size, y.data<float>());
  return {y, z, kept};
}

Tensors convolution_norm_grad(const Tensor& x, const Tensor& w, const Tensor& z, const Tensor& kept, const Tensor& dy,
                              int stride, int padding, int act, bool batch_statistics) {
  if (z.shape().size() == 4) {
    const Tensors norm = batch_norm_grad(z, kept, dy, act, batch_statistics);
    const Tensors made =
        is_depthwise(w) ? depthwise_grad(x, w, norm[0], stride, padding) : pointwise_grad(x, w, norm[0]);
    return {made[0], made[1], norm[1], norm[2]};
  }
  const Shape s = shape_of(x);
  const int size = s.height * s.width, out = static_cast<int>(w.shape()[0]), all = s.batch * size;
  Tensor dx = floats(x.shape()), dw = floats(w.shape()), dscale = floats({out}), dbias = floats({out}), same = kept;
  const Floats rows = scratch(x.numel()), gradients = scratch(dy.numel());
  kernels().gather(dy.data<float>(), s.batch, out, size, gradients.get());
  kernels().batch_norm_grad({1, out, 1, all}, parts(&same, out, act, batch_statistics), z.data<float>(),
                            gradients.get(), gradients.get(), dscale.data<float>(), dbias.data<float>());
  kernels().gather(x.data<float>(), s.batch, s.channels, size, rows.get());
  mix_grad(gradients.get(), rows.get(), 1, s.channels, out, all, dw.data<float>());
  mix_rows(w.data<float>(), true, gradients.get(), out, s.channels, all, rows.get());
  kernels().scatter(rows.get(), s.batch, s.channels, size, dx.data<float>());
  return {dx, dw, dscale, dbias};
}

// Squeeze-excite: x times hardsigmoid(w2 relu(w1 means(x) + b1) + b2), a factor for each plane

void dense(const float* x, const float* w, const float* bias, int rows, int in, int out, float* y) {
  for (int n = 0; n < rows; ++n) std::memcpy(y + int64_t{n} * out, bias, sizeof(float) * out);
  product(false, true, rows, out, in, x, in, w, in, 1, y, out);
}

Tensors squeeze_excite(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2) {
  const Shape s = shape_of(x);
  const int middle = static_cast<int>(w1.shape()[0]), size = s.height * s.width;
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
  const int middle = static_cast<int>(w1.shape()[0]), channels = s.channels, size = s.height * s.width;
  const int64_t planes = int64_t{s.batch} * channels;
  Tensor dx = floats(x.shape()), dw1 = floats(w1.shape()), db1 = floats({middle}), dw2 = floats(w2.shape()),
         db2 = floats({channels});
  std::vector<float> dgate(planes), dhidden(int64_t{s.batch} * middle), dmeans(planes);
  const float *g = gate.data<float>(), *h = hidden.data<float>();
  kernels().plane_products(planes, size, x.data<float>(), dy.data<float>(), dgate.data());
  for (int64_t i = 0; i < planes; ++i) dgate[i] = g[i] > 0 && g[i] < 1 ? dgate[i] * (1.0f / 6) : 0;
  product(true, false, channels, middle, s.batch, dgate.data(), channels, h, middle, 0, dw2.data<float>(), middle);
  column_sums(dgate.data(), s.batch, channels, db2.data<float>());
  product(false, false, s.batch, middle, channels, dgate.data(), channels, w2.data<float>(), middle, 0, dhidden.data(),
          middle);
  for (int i = 0; i < s.batch * middle; ++i) dhidden[i] = h[i] > 0 ? dhidden[i] : 0;
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
  Tensor dx = floats(x.shape());
  const float* from = dy.data<float>();
  float* to = dx.data<float>();
  for (int64_t p = 0; p < int64_t{s.batch} * s.channels; ++p) {
    const float value = from[p] / static_cast<float>(size);
    for (int64_t i = 0; i < size; ++i) to[p * size + i] = value;
  }
  return {dx};
}

// 1 if all numbers are finite, else 0

Tensors finite(const Tensors& all) {
  Tensor answer = floats({1});
  bool good = true;
  for (const Tensor& x : all) good = good && kernels().finite(x.numel(), x.data<float>());
  answer.data<float>()[0] = good;
  return {answer};
}

}  // namespace
}  // namespace ppfleet

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

PD_BUILD_OP(ppfleet_pointwise).Inputs({"X", "W"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(ppfleet::pointwise));
PD_BUILD_GRAD_OP(ppfleet_pointwise)
    .Inputs({"X", "W", Grad("Y")})
    .Outputs({Grad("X"), Grad("W")})
    .SetKernelFn(PD_KERNEL(ppfleet::pointwise_grad));

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

PD_BUILD_OP(ppfleet_squeeze_excite)
    .Inputs({"X", "W1", "B1", "W2", "B2"})
    .Outputs({"Y", "Means", "Hidden", "Gate"})
    .SetKernelFn(PD_KERNEL(ppfleet::squeeze_excite));
PD_BUILD_GRAD_OP(ppfleet_squeeze_excite)
    .Inputs({"X", "W1", "W2", "Means", "Hidden", "Gate", Grad("Y")})
    .Outputs({Grad("X"), Grad("W1"), Grad("B1"), Grad("W2"), Grad("B2")})
    .SetKernelFn(PD_KERNEL(ppfleet::squeeze_excite_grad));

PD_BUILD_OP(ppfleet_global_mean).Inputs({"X"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(ppfleet::global_mean));
PD_BUILD_GRAD_OP(ppfleet_global_mean)
    .Inputs({"X", Grad("Y")})
    .Outputs({Grad("X")})
    .SetKernelFn(PD_KERNEL(ppfleet::global_mean_grad));

PD_BUILD_OP(ppfleet_finite).Inputs({paddle::Vec("X")}).Outputs({"Answer"}).SetKernelFn(PD_KERNEL(ppfleet::finite));
