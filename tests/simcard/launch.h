// Kernels of the card: Paddle's own CPU kernels, run by the thread of a stream on tensors that alias device memory.
//
//   SIM_KERNEL(relu, Unary);     // registers `relu` for every data type that the CPU has it for, and float16, bfloat16
//
// At the launch, on the thread of Python, the outputs are allocated as InferMeta said and the arguments are kept; the
// CPU kernel runs when the stream comes to it. As on CUDA, a launch does not keep tensors alive: the order of the
// stream protects their memory. Where the CPU has no float16 or bfloat16 kernel, the float32 one runs between casts.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "card.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/generator.h"
#include "paddle/phi/core/kernel_registry.h"

namespace sim {

using phi::DataType;
using phi::DenseTensor;

// Signatures, without those of the data types: SIM_KERNEL(name, Signature<arguments>).
template <class... A>
using Signature = void (*)(const phi::CPUContext&, A...);
using In = const DenseTensor&;
using Out = DenseTensor*;
using Optional = const paddle::optional<DenseTensor>&;
using Unary = Signature<In, Out>;
using Binary = Signature<In, In, Out>;
#define SIM_SIGNATURE(Kernel) decltype(&phi::Kernel<float, phi::CPUContext>)

// ---- tensors.cc

// What a launch knows while it collects its arguments.
struct Call {
  const phi::CustomContext& ctx;
  DataType type;   // for which the kernel was selected
  bool widened;    // the CPU kernel is the float32 one
  bool detached;   // outputs are made elsewhere and copied into device memory when the stream comes to it
  // What the CPU kernel gets for a tensor. An output that is an input too (in place) must be the same object there.
  std::map<const DenseTensor*, std::shared_ptr<DenseTensor>> given;
  std::map<const void*, std::shared_ptr<phi::Allocation>> memory;  // kernels ask whether two tensors share it
};

class InputTensor {
 public:
  InputTensor(Call* call, const DenseTensor& tensor);
  void Load();                                // widens; on the stream
  const DenseTensor& Get() const { return *given_; }
  void Blank();                               // for a run that only draws random numbers

 private:
  bool widened_;
  DenseTensor alias_;
  std::shared_ptr<DenseTensor> given_;
};

class OutputTensor {
 public:
  OutputTensor(Call* call, DenseTensor* tensor);
  void Load();
  DenseTensor* Get() const { return given_.get(); }
  void Store();
  void Blank();

 private:
  bool detached_ = false, widened_ = false, in_place_ = false;
  DenseTensor alias_;
  std::shared_ptr<DenseTensor> given_;        // null where Paddle wants no such output
};

phi::CPUContext& CpuContext();                // of the calling thread
[[noreturn]] void ThrowFailure(int card);
void EnqueueKernel(const phi::CustomContext& ctx, const char* name, std::function<void()> run);

// ---- Arguments of a kernel, kept from the launch until the stream runs it.

template <class A>
struct Argument {  // an attribute
  std::decay_t<A> value;
  Argument(Call*, A a) : value(a) {}
  void Load() {}
  A Get() { return value; }
  void Store() {}
  void Blank() {}
};

template <>
struct Argument<In> : InputTensor {
  using InputTensor::InputTensor;
  void Store() {}
};

template <>
struct Argument<Out> : OutputTensor {
  using OutputTensor::OutputTensor;
};

template <>
struct Argument<Optional> {
  std::vector<InputTensor> kept;
  paddle::optional<DenseTensor> value;
  Argument(Call* call, Optional tensor) {
    if (tensor) kept.emplace_back(call, *tensor);
  }
  void Load() {
    for (auto& one : kept) one.Load(), value = one.Get();
  }
  Optional Get() { return value; }
  void Store() {}
  void Blank() {
    for (auto& one : kept) one.Blank(), value = one.Get();
  }
};

// Several tensors; `Base` is DenseTensor, or TensorBase where Paddle allows sparse ones, which the card does not.
template <class Base>
struct InputTensors {
  std::vector<InputTensor> kept;
  std::vector<const Base*> value;
  InputTensors(Call* call, const std::vector<const Base*>& tensors) {
    for (auto* one : tensors) kept.emplace_back(call, static_cast<const DenseTensor&>(*one));
  }
  void Load() {
    value.clear();
    for (auto& one : kept) one.Load(), value.push_back(&one.Get());
  }
  const std::vector<const Base*>& Get() { return value; }
  void Store() {}
  void Blank() {
    for (auto& one : kept) one.Blank();
  }
};

template <>
struct Argument<const std::vector<const DenseTensor*>&> : InputTensors<DenseTensor> {
  using InputTensors::InputTensors;
};

template <>
struct Argument<const std::vector<const phi::TensorBase*>&> : InputTensors<phi::TensorBase> {
  using InputTensors::InputTensors;
};

template <>
struct Argument<const paddle::optional<std::vector<const DenseTensor*>>&> {
  std::vector<InputTensors<DenseTensor>> kept;
  paddle::optional<std::vector<const DenseTensor*>> value;
  Argument(Call* call, const paddle::optional<std::vector<const DenseTensor*>>& tensors) {
    if (tensors) kept.emplace_back(call, *tensors);
  }
  void Load() {
    for (auto& one : kept) one.Load(), value = one.Get();
  }
  const paddle::optional<std::vector<const DenseTensor*>>& Get() { return value; }
  void Store() {}
  void Blank() {}
};

template <>
struct Argument<std::vector<DenseTensor*>> {
  std::vector<OutputTensor> kept;
  Argument(Call* call, const std::vector<DenseTensor*>& tensors) {
    for (auto* one : tensors) kept.emplace_back(call, one);
  }
  void Load() {
    for (auto& one : kept) one.Load();
  }
  std::vector<DenseTensor*> Get() {
    std::vector<DenseTensor*> value;
    for (auto& one : kept) value.push_back(one.Get());
    return value;
  }
  void Store() {
    for (auto& one : kept) one.Store();
  }
  void Blank() {}
};

// ---- What an operator may add: see SIM_KERNEL_WITH.

struct Plain {
  // Kernels that draw random numbers do so at the launch, so that their order is that of the program. Those that fill
  // a tensor are run then and there; others (dropout) run twice: at the launch on blank inputs, only to draw, and on
  // the stream with a generator that starts from the same state.
  static constexpr bool kCreates = false, kReplays = false;
  // Writes only parts of its output: no float32 copy of it can stand in for it.
  static constexpr bool kWritesParts = false;
  // Paddle 2.6 calls a few operators as static graphs do, also in dynamic graphs.
  static constexpr bool kLegacy = false;
  static void Define(phi::KernelArgsDef*) {}              // where tensors may be
  template <class... A>
  static void Before(const phi::CustomContext&, A...) {}  // before the arguments are kept: meta of outputs
  template <class... A>
  static void After(const phi::CustomContext&, A...) {}   // after: what the launch changes on the host
};

struct Creates : Plain {
  static constexpr bool kCreates = true;
};

struct Replays : Plain {
  static constexpr bool kReplays = true;
};

struct Legacy : Plain {
  static constexpr bool kLegacy = true;
};

// ---- The launch.

template <class Fn, class Tuple>
void RunOnCpu(Fn fn, const phi::CPUContext& ctx, Tuple* arguments) {
  std::apply([&](auto&... each) { fn(ctx, each.Get()...); }, *arguments);
}

template <class Tuple>
void Load(Tuple* arguments) {
  std::apply([](auto&... each) { (each.Load(), ...); }, *arguments);
}

template <class Tuple>
void Store(Tuple* arguments) {
  std::apply([](auto&... each) { (each.Store(), ...); }, *arguments);
}

class DrawFrom {  // CPU kernels of the calling thread draw from this generator
 public:
  explicit DrawFrom(phi::Generator* generator);
  ~DrawFrom();

 private:
  phi::Generator* before_;
};
std::shared_ptr<phi::Generator> CopyOf(phi::Generator* generator);

template <class Op, class Fn>
struct Launcher;

template <class Op, class... A>
struct Launcher<Op, void (*)(const phi::CPUContext&, A...)> {
  using Fn = void (*)(const phi::CPUContext&, A...);
  using Arguments = std::tuple<Argument<A>...>;
  struct Target {
    Fn fn = nullptr;
    bool widened = false;
  };
  static inline Target targets[static_cast<int>(DataType::NUM_DATA_TYPES)];

  template <int type>
  static void Run(const phi::CustomContext& ctx, A... args) {
    Launch(static_cast<DataType>(type), ctx, args...);
  }

  static void Launch(DataType type, const phi::CustomContext& ctx, A... args) {
    using Extra = typename Op::Extra;
    const Target target = targets[static_cast<int>(type)];
    Extra::Before(ctx, args...);
    Call call{ctx, type, target.widened, Extra::kCreates, {}, {}};
    std::shared_ptr<Arguments> kept(new Arguments{Argument<A>(&call, args)...});
    Extra::After(ctx, args...);
    if constexpr (Extra::kCreates) {
      Load(kept.get());
      DrawFrom generator(ctx.GetGenerator());
      RunOnCpu(target.fn, CpuContext(), kept.get());
      EnqueueKernel(ctx, Op::Name(), [kept] { Store(kept.get()); });
    } else if constexpr (Extra::kReplays) {
      std::shared_ptr<phi::Generator> copy = CopyOf(ctx.GetGenerator());
      {
        DrawFrom generator(ctx.GetGenerator());
        std::apply([](auto&... each) { (each.Blank(), ...); }, *kept);
        RunOnCpu(target.fn, CpuContext(), kept.get());
      }
      EnqueueKernel(ctx, Op::Name(), [kept, copy, fn = target.fn] {
        DrawFrom generator(copy.get());
        Load(kept.get());
        RunOnCpu(fn, CpuContext(), kept.get());
        Store(kept.get());
      });
    } else {
      EnqueueKernel(ctx, Op::Name(), [kept, fn = target.fn] {
        Load(kept.get());
        RunOnCpu(fn, CpuContext(), kept.get());
        Store(kept.get());
      });
    }
  }
};

// ---- Registration.

constexpr DataType kTypes[] = {DataType::BOOL,    DataType::UINT8,   DataType::INT8,     DataType::INT16,
                               DataType::INT32,   DataType::INT64,   DataType::FLOAT16,  DataType::BFLOAT16,
                               DataType::FLOAT32, DataType::FLOAT64};

// Paddle's CPU kernel for this type, or null. For float16 and bfloat16 it is the float32 one, unless the type matters:
// as on cards, sums are then made in float32.
const phi::Kernel* FindCpuKernel(const char* name, DataType type, bool writes_parts, bool* widened);
// The entry for static graphs, which the card does not support: it would double the time to compile.
[[noreturn]] void NotInGraphs(phi::KernelContext*);
// Enters the kernel; places and types of its arguments are as in `adopted`, which speaks of the CPU.
void Enter(const char* name, DataType type, phi::Kernel kernel, const phi::KernelArgsDef& adopted);
// Whether the CPU kernel has the declared arguments; if not, the operator is left to Paddle's fallback.
bool SameArguments(const char* name, const phi::KernelArgsDef& declared, const phi::KernelArgsDef& cpu);

template <class Op, class L, int type, class... A>
void RegisterType(void (*)(const phi::CPUContext&, A...)) {
  bool widened = false;
  const phi::Kernel* cpu = FindCpuKernel(Op::Name(), static_cast<DataType>(type), Op::Extra::kWritesParts, &widened);
  if (!cpu) return;
  using Run = void (*)(const phi::CustomContext&, A...);
  constexpr Run run = &L::template Run<type>;
  phi::KernelFn in_graphs = &NotInGraphs;
  if constexpr (Op::Extra::kLegacy) in_graphs = phi::KernelImpl<Run, run>::Compute;
  phi::Kernel kernel(in_graphs, reinterpret_cast<void*>(run));
  phi::KernelArgsParseFunctor<Run>::Parse(
      phi::KernelKey(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, static_cast<DataType>(type)),
      kernel.mutable_args_def());
  if (!SameArguments(Op::Name(), kernel.args_def(), cpu->args_def())) return;
  L::targets[type] = {cpu->GetVariadicKernelFn<typename L::Fn>(), widened};
  phi::KernelArgsDef adopted = cpu->args_def();
  Op::Extra::Define(&adopted);
  Enter(Op::Name(), static_cast<DataType>(type), kernel, adopted);
}

template <class Op, size_t... i>
void RegisterTypes(std::index_sequence<i...>) {
  using L = Launcher<Op, typename Op::Fn>;
  (RegisterType<Op, L, static_cast<int>(kTypes[i])>(typename L::Fn(nullptr)), ...);
}

template <class Op>
void Register() {
  if (!Lacks(Op::Name())) RegisterTypes<Op>(std::make_index_sequence<std::size(kTypes)>());
}

#define SIM_KERNEL_WITH(Extra_, name, ...)                 \
  do {                                                     \
    struct Op {                                            \
      using Fn = __VA_ARGS__;                              \
      using Extra = Extra_;                                \
      static const char* Name() { return #name; }          \
    };                                                     \
    Register<Op>();                                        \
  } while (false)
#define SIM_KERNEL(name, ...) SIM_KERNEL_WITH(Plain, name, __VA_ARGS__)

}  // namespace sim
