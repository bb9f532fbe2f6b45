// Synchronised BatchNorm, which no CPU kernel exists for. As in the CUDA kernel, the statistics are summed over the ranks
// in the stream that computes, in the forward and in the backward pass. NCHW, float32 statistics.
#include <cmath>

#include "launch.h"
#include "paddle/phi/core/custom_kernel.h"

namespace sim {
namespace {

template <class T>
T* Data(const DenseTensor& tensor) {
  return static_cast<T*>(Reach(tensor.data()));
}

struct Shape {
  int64_t images, channels, pixels;
  explicit Shape(const DenseTensor& x)
      : images(x.dims()[0]), channels(x.dims()[1]), pixels(x.numel() / images / channels) {}
  int64_t channel(int64_t i) const { return i / pixels % channels; }
};

template <class T>
void Forward(const phi::CustomContext& ctx, In x, In mean, In variance, In scale, In bias, bool is_test, float momentum,
             float epsilon, const std::string&, bool use_global, bool, Out y, Out mean_out, Out variance_out,
             Out saved_mean, Out saved_variance, Out reserve) {
  Shape shape(x);
  ctx.template Alloc<T>(y);
  for (auto* each : {mean_out, variance_out, saved_mean, saved_variance}) ctx.template Alloc<float>(each);
  if (reserve) reserve->Resize(phi::make_ddim({1})), ctx.template Alloc<T>(reserve);
  auto sums = std::make_shared<std::vector<float>>(2 * shape.channels, 0.0f);
  const T* from = Data<T>(x);
  bool known = is_test || use_global;
  size_t ranks = 1;
  if (!known) {
    EnqueueKernel(ctx, "sync_batch_norm_sums", [=, n = x.numel()] {
      for (int64_t i = 0; i < n; ++i) {
        float value = static_cast<float>(from[i]);
        (*sums)[shape.channel(i)] += value, (*sums)[shape.channels + shape.channel(i)] += value * value;
      }
    });
    ranks = SumOverRanks(static_cast<C_Stream>(ctx.stream()), sums);
  }
  T* to = Data<T>(*y);
  const float *old_mean = Data<float>(mean), *old_variance = Data<float>(variance), *gain = Data<float>(scale),
              *shift = Data<float>(bias);
  float *new_mean = Data<float>(*mean_out), *new_variance = Data<float>(*variance_out), *saved = Data<float>(*saved_mean),
        *saved_inverse = Data<float>(*saved_variance);
  EnqueueKernel(ctx, "sync_batch_norm", [=, n = x.numel()] {
    float count = static_cast<float>(shape.images * shape.pixels * ranks);
    for (int64_t c = 0; c < shape.channels; ++c) {
      float mu = (*sums)[c] / count, var = (*sums)[shape.channels + c] / count - mu * mu;
      if (known) {
        mu = old_mean[c], var = old_variance[c];
      } else {
        new_mean[c] = old_mean[c] * momentum + mu * (1 - momentum);
        new_variance[c] = old_variance[c] * momentum + var * (1 - momentum);
      }
      saved[c] = mu, saved_inverse[c] = 1.0f / std::sqrt(var + epsilon);
    }
    for (int64_t i = 0; i < n; ++i) {
      int64_t c = shape.channel(i);
      float by = gain[c] * saved_inverse[c];
      to[i] = static_cast<T>(static_cast<float>(from[i]) * by + (shift[c] - saved[c] * by));
    }
  });
}

template <class T>
void Backward(const phi::CustomContext& ctx, In x, In scale, In, In saved_mean, In saved_variance, Optional, In y_grad,
              float, float, const std::string&, bool, bool, bool, Out x_grad, Out scale_grad, Out bias_grad) {
  Shape shape(x);
  auto sums = std::make_shared<std::vector<float>>(2 * shape.channels, 0.0f);
  const T *from = Data<T>(x), *gradient = Data<T>(y_grad);
  const float *mu = Data<float>(saved_mean), *inverse = Data<float>(saved_variance), *gain = Data<float>(scale);
  float* gain_gradient = scale_grad ? ctx.template Alloc<float>(scale_grad) : nullptr;
  float* shift_gradient = bias_grad ? ctx.template Alloc<float>(bias_grad) : nullptr;
  auto normal = [=](int64_t i) {
    int64_t c = shape.channel(i);
    return (static_cast<float>(from[i]) - mu[c]) * inverse[c];
  };
  EnqueueKernel(ctx, "sync_batch_norm_grad_sums", [=, n = x.numel()] {
    for (int64_t i = 0; i < n; ++i) {
      float g = static_cast<float>(gradient[i]);
      (*sums)[shape.channel(i)] += g, (*sums)[shape.channels + shape.channel(i)] += g * normal(i);
    }
    size_t bytes = shape.channels * sizeof(float);
    if (shift_gradient) std::memcpy(Reach(shift_gradient), sums->data(), bytes);
    if (gain_gradient) std::memcpy(Reach(gain_gradient), sums->data() + shape.channels, bytes);
  });
  size_t ranks = SumOverRanks(static_cast<C_Stream>(ctx.stream()), sums);
  if (!x_grad) return;
  T* to = static_cast<T*>(Reach(ctx.template Alloc<T>(x_grad)));
  EnqueueKernel(ctx, "sync_batch_norm_grad", [=, n = x.numel()] {
    float count = static_cast<float>(shape.images * shape.pixels * ranks);
    for (int64_t i = 0; i < n; ++i) {
      int64_t c = shape.channel(i);
      float g = static_cast<float>(gradient[i]) - (*sums)[c] / count - normal(i) * (*sums)[shape.channels + c] / count;
      to[i] = static_cast<T>(g * inverse[c] * gain[c]);
    }
  });
}

template <class Run, Run run>
void EnterOwn(const char* name, DataType type) {
  if (Lacks(name) || (type == DataType::FLOAT16 && Lacks("float16")) || (type == DataType::BFLOAT16 && Lacks("bfloat16")))
    return;
  phi::Kernel kernel(&NotInGraphs, reinterpret_cast<void*>(run));
  phi::KernelKey key(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, type);
  phi::KernelArgsParseFunctor<Run>::Parse(key, kernel.mutable_args_def());
  Enter(name, type, kernel, phi::KernelArgsDef(kernel.args_def()));
}

template <class T>
void EnterBoth(DataType type) {
  EnterOwn<decltype(&Forward<T>), &Forward<T>>("sync_batch_norm", type);
  if (!Lacks("sync_batch_norm")) EnterOwn<decltype(&Backward<T>), &Backward<T>>("sync_batch_norm_grad", type);
}

}  // namespace

void RegisterSyncBatchNorm() {
  EnterBoth<float>(DataType::FLOAT32);
  EnterBoth<phi::dtype::float16>(DataType::FLOAT16);
  EnterBoth<phi::dtype::bfloat16>(DataType::BFLOAT16);
}

}  // namespace sim
