// Tensors of a launch, and the contexts in which CPU kernels run. See launch.h.
#include "launch.h"

#include <cstring>

#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/core/enforce.h"

namespace sim {
namespace {

bool Half(DataType type) { return type == DataType::FLOAT16 || type == DataType::BFLOAT16; }

// The same tensor for a CPU kernel: the same meta, the address that this process may touch.
DenseTensor AliasOf(Call* call, const DenseTensor& tensor) {
  if (!tensor.initialized()) {
    DenseTensor empty;
    if (tensor.meta().valid()) empty.set_meta(tensor.meta());
    return empty;
  }
  const char* begin = static_cast<const char*>(tensor.data()) - tensor.meta().offset;  // of its allocation
  auto& memory = call->memory[begin];
  if (!memory) memory = std::make_shared<phi::Allocation>(Reach(begin), tensor.capacity(), phi::CPUPlace());
  return DenseTensor(memory, tensor.meta());
}

// Host memory may change as soon as the launch returns.
DenseTensor CopyOf(const DenseTensor& tensor) {
  DenseTensor copy;
  copy.set_meta(tensor.meta());
  void* to = CpuContext().Alloc(&copy, tensor.dtype());
  std::memcpy(to, tensor.data(), tensor.numel() * phi::SizeOf(tensor.dtype()));
  return copy;
}

template <class From, class To>
void Cast(const void* from, void* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) static_cast<To*>(to)[i] = static_cast<To>(static_cast<const From*>(from)[i]);
}

DenseTensor Widen(const DenseTensor& narrow) {
  DenseTensor wide;
  wide.Resize(narrow.dims());
  float* to = CpuContext().Alloc<float>(&wide);
  if (narrow.dtype() == DataType::FLOAT16) Cast<phi::dtype::float16, float>(narrow.data(), to, narrow.numel());
  if (narrow.dtype() == DataType::BFLOAT16) Cast<phi::dtype::bfloat16, float>(narrow.data(), to, narrow.numel());
  return wide;
}

void Narrow(const DenseTensor& wide, DenseTensor* narrow) {
  if (narrow->dtype() == DataType::FLOAT16) Cast<float, phi::dtype::float16>(wide.data(), narrow->data(), wide.numel());
  if (narrow->dtype() == DataType::BFLOAT16) Cast<float, phi::dtype::bfloat16>(wide.data(), narrow->data(), wide.numel());
}

bool OnHost(const DenseTensor& tensor) { return tensor.initialized() && tensor.place() == phi::CPUPlace(); }

}  // namespace

InputTensor::InputTensor(Call* call, const DenseTensor& tensor)
    : widened_(call->widened && Half(tensor.dtype())),
      alias_(OnHost(tensor) ? CopyOf(tensor) : AliasOf(call, tensor)),
      given_(std::make_shared<DenseTensor>()) {
  call->given[&tensor] = given_;
}

void InputTensor::Load() {
  *given_ = alias_;
  if (!widened_) return;
  if (alias_.initialized()) {
    *given_ = Widen(alias_);
  } else if (alias_.meta().valid()) {  // only its shape and type matter
    phi::DenseTensorMeta meta = alias_.meta();
    meta.dtype = DataType::FLOAT32;
    given_->set_meta(meta);
  }
}

void InputTensor::Blank() {
  *given_ = DenseTensor();
  if (!alias_.initialized()) return;
  given_->Resize(alias_.dims());
  DataType type = widened_ ? DataType::FLOAT32 : alias_.dtype();
  std::memset(CpuContext().Alloc(given_.get(), type), 0, given_->numel() * phi::SizeOf(type));
}

OutputTensor::OutputTensor(Call* call, DenseTensor* tensor) {
  if (!tensor) return;
  auto input = call->given.find(tensor);
  in_place_ = input != call->given.end();
  given_ = in_place_ ? input->second : std::make_shared<DenseTensor>();
  if (OnHost(*tensor)) {  // the operator's After() has to write it; see Adam
    alias_ = CopyOf(*tensor);
    return;
  }
  DataType type = tensor->dtype() == DataType::UNDEFINED ? call->type : tensor->dtype();
  if (tensor->numel() >= 0) call->ctx.Alloc(tensor, type);
  alias_ = AliasOf(call, *tensor);
  widened_ = call->widened && Half(type);
  detached_ = call->detached || widened_;
}

void OutputTensor::Load() {
  if (!given_ || in_place_) return;
  if (detached_)
    Blank();
  else
    *given_ = alias_;
}

void OutputTensor::Blank() {
  if (!given_) return;
  phi::DenseTensorMeta meta = alias_.meta();
  if (widened_) meta.dtype = DataType::FLOAT32;
  *given_ = DenseTensor();
  if (meta.valid()) given_->set_meta(meta);
}

void OutputTensor::Store() {
  if (!given_ || !given_->initialized()) return;
  if (widened_) {
    Narrow(*given_, &alias_);
  } else if (given_->data() != alias_.data()) {  // the kernel made its own memory, or shares that of an input
    size_t bytes = given_->numel() * phi::SizeOf(given_->dtype());
    if (!alias_.initialized() || bytes > alias_.capacity() || given_->dtype() != alias_.dtype())
      throw std::runtime_error("the kernel makes another output than InferMeta told");
    std::memcpy(alias_.data(), given_->data(), bytes);
  }
}

phi::CPUContext& CpuContext() {
  thread_local std::unique_ptr<phi::CPUContext> context;
  if (!context) {
    auto* shared = phi::DeviceContextPool::Instance().Get(phi::CPUPlace());
    context = std::make_unique<phi::CPUContext>(phi::CPUPlace());
    context->SetAllocator(&shared->GetAllocator());
    context->SetHostAllocator(&shared->GetHostAllocator());
    context->SetZeroAllocator(&shared->GetZeroAllocator());
    context->SetHostZeroAllocator(&shared->GetHostZeroAllocator());
    context->SetGenerator(shared->GetGenerator());
    context->SetHostGenerator(shared->GetHostGenerator());
  }
  return *context;
}

DrawFrom::DrawFrom(phi::Generator* generator) : before_(CpuContext().GetGenerator()) {
  CpuContext().SetGenerator(generator);
  CpuContext().SetHostGenerator(generator);
}

DrawFrom::~DrawFrom() {
  CpuContext().SetGenerator(before_);
  CpuContext().SetHostGenerator(before_);
}

std::shared_ptr<phi::Generator> CopyOf(phi::Generator* generator) {
  auto copy = std::make_shared<phi::Generator>(0);
  *copy->GetCPUEngine() = *generator->GetCPUEngine();
  return copy;
}

void ThrowFailure(int card) {
  PADDLE_THROW(phi::errors::External("simcard: card %d failed before: %s", card, FailureOf(card)));
}

void EnqueueKernel(const phi::CustomContext& ctx, const char* name, std::function<void()> run) {
  static std::atomic<uint64_t> launched{0};
  int card = ctx.GetPlace().GetDeviceId();
  if (Failed(card)) ThrowFailure(card);
  auto stream = static_cast<C_Stream>(ctx.stream());
  MarkCompute(stream);
  Task task;
  task.name = name;
  task.run = std::move(run);
  task.delay_us = settings().delay_us;
  task.number = ++launched;
  task.done = kKernelsDone;
  ApplyRules(&task, false, 0, true);
  Count(kKernels);
  Trace("launch", R"("name":"%s","number":%zu,"stream":%d)", name, task.number, StreamNumber(stream));
  Enqueue(stream, std::move(task));
}

}  // namespace sim
