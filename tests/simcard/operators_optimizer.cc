// Optimizers, and what mixed precision does to gradients.
#include "launch.h"
#include "paddle/phi/kernels/adam_kernel.h"
#include "paddle/phi/kernels/adamw_kernel.h"
#include "paddle/phi/kernels/amp_kernel.h"
#include "paddle/phi/kernels/clip_by_norm_kernel.h"
#include "paddle/phi/kernels/lamb_kernel.h"
#include "paddle/phi/kernels/merged_momentum_kernel.h"
#include "paddle/phi/kernels/momentum_kernel.h"
#include "paddle/phi/kernels/rmsprop_kernel.h"
#include "paddle/phi/kernels/sgd_kernel.h"

namespace sim {
namespace {

// Where the powers of beta are among the arguments, from the first and from the last. Paddle keeps them on the host,
// for a card too; the next step reads them there, so they are multiplied at the launch, as the CUDA kernel does.
#if SIM_PADDLE_MAJOR >= 3
constexpr int kBeta1Power = 6;
#else
constexpr int kBeta1Power = 5;
#endif
constexpr int kSkip = kBeta1Power + 3, kBeta1 = kBeta1Power + 4, kBeta1PowerOutFromEnd = 3;

void Multiply(const DenseTensor& power, const phi::Scalar& beta, DenseTensor* out) {
  if (!power.initialized() || power.place() != phi::CPUPlace() || !out->initialized()) return;
  if (power.dtype() == DataType::FLOAT64)
    *static_cast<double*>(out->data()) = beta.to<double>() * *static_cast<const double*>(power.data());
  else
    *static_cast<float*>(out->data()) = beta.to<float>() * *static_cast<const float*>(power.data());
}

struct Adam : Plain {
  static void Define(phi::KernelArgsDef* args) {
    for (int i : {kBeta1Power, kBeta1Power + 1, kSkip}) args->input_defs()[i].SetBackend(phi::Backend::ALL_BACKEND);
  }
  template <class... A>
  static void After(const phi::CustomContext& ctx, A... args) {
    auto all = std::tie(args...);
    const auto& skip = std::get<kSkip>(all);
    if (skip && skip->initialized()) {  // the CUDA kernel reads it, and waits for it
      BlockedOn("skip_update", [&] { ctx.Wait(); });
      if (*static_cast<const bool*>(Reach(skip->data()))) return;
    }
    constexpr int out = sizeof...(A) - kBeta1PowerOutFromEnd;
    Multiply(std::get<kBeta1Power>(all), std::get<kBeta1>(all), std::get<out>(all));
    Multiply(std::get<kBeta1Power + 1>(all), std::get<kBeta1 + 1>(all), std::get<out + 1>(all));
  }
};

}  // namespace

void RegisterOptimizers() {
  SIM_KERNEL(sgd, SIM_SIGNATURE(SGDDenseKernel));
  SIM_KERNEL(momentum, SIM_SIGNATURE(MomentumDenseKernel));
  SIM_KERNEL(merged_momentum, SIM_SIGNATURE(MergedMomentumKernel));
  SIM_KERNEL_WITH(Adam, adam, SIM_SIGNATURE(AdamDenseKernel));
  SIM_KERNEL_WITH(Adam, adamw, SIM_SIGNATURE(AdamwDenseKernel));
  SIM_KERNEL(rmsprop, SIM_SIGNATURE(RmspropDenseKernel));
  SIM_KERNEL(clip_by_norm, SIM_SIGNATURE(ClipByNormKernel));
  SIM_KERNEL_WITH(Legacy, check_finite_and_unscale, SIM_SIGNATURE(CheckFiniteAndUnscaleKernel));
  SIM_KERNEL_WITH(Legacy, update_loss_scaling, SIM_SIGNATURE(UpdateLossScalingKernel));
}

}  // namespace sim
