// Where Paddle finds the plugin: it fills Paddle's table of functions and registers the kernels.
#include "card.h"
#include "reduce.h"

namespace sim {
namespace {

C_Status Nothing() { return C_SUCCESS; }
C_Status NothingOn(const C_Device) { return C_SUCCESS; }

C_Status SetDevice(const C_Device card) {
  CurrentCard() = card->id;
  return C_SUCCESS;
}

C_Status GetDevice(const C_Device card) {
  card->id = CurrentCard();
  return C_SUCCESS;
}

C_Status CountDevices(size_t* count) {
  *count = settings().cards;
  return C_SUCCESS;
}

C_Status ListDevices(size_t* cards) {
  for (size_t card = 0; card < settings().cards; ++card) cards[card] = card;
  return C_SUCCESS;
}

#if SIM_PADDLE_MAJOR >= 3
C_Status Float16(const C_Device, bool* supported) {
  *supported = !Lacks("float16");
  return C_SUCCESS;
}

C_Status BFloat16Supported(const C_Device, bool* supported) {
  *supported = !Lacks("bfloat16");
  return C_SUCCESS;
}
#endif

template <class T>
void AddScaled(size_t n, float alpha, const void* x, float beta, void* y) {
  auto* from = static_cast<const T*>(x);
  auto* to = static_cast<T*>(y);
  for (size_t i = 0; i < n; ++i) to[i] = T(alpha * float(from[i]) + (beta ? beta * float(to[i]) : 0.0f));
}

// y = alpha x + beta y: how Paddle accumulates gradients on custom devices.
C_Status Axpby(const C_Device card, C_Stream stream, C_DataType type, size_t n, float alpha, void* x, float beta, void* y) {
  if (Failed(card->id)) return C_ERROR;
  if (type != FLOAT32 && type != FLOAT64 && type != FLOAT16 && type != BFLOAT16) return C_ERROR;
  Task task;
  task.name = "axpby";
  task.delay_us = settings().delay_us;
  task.done = kKernelsDone;
  task.run = [=] {
    void *from = Reach(x), *to = Reach(y);
    if (type == FLOAT32) AddScaled<float>(n, alpha, from, beta, to);
    if (type == FLOAT64) AddScaled<double>(n, alpha, from, beta, to);
    if (type == FLOAT16) AddScaled<_Float16>(n, alpha, from, beta, to);
    if (type == BFLOAT16) AddScaled<BFloat16>(n, alpha, from, beta, to);
  };
  MarkCompute(stream);
  ApplyRules(&task, false, 0, true);
  Count(kKernels);
  return Enqueue(stream, std::move(task));
}

}  // namespace
}  // namespace sim

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  static char type[] = "sim", kind[] = "V1";
  params->device_type = type;
  params->sub_device_type = kind;
  auto* table = params->interface;
  sim::OpenMemory();
  sim::FillMemory(table);
  sim::FillCopies(table);
  sim::FillStreams(table);
  sim::FillCollectives(table);
  table->initialize = sim::Nothing;
  table->finalize = sim::Nothing;
  table->init_device = sim::NothingOn;
  table->deinit_device = sim::NothingOn;
  table->set_device = sim::SetDevice;
  table->get_device = sim::GetDevice;
  table->get_device_count = sim::CountDevices;
  table->get_device_list = sim::ListDevices;
  table->blas_axpby = sim::Axpby;
#if SIM_PADDLE_MAJOR >= 3
  table->is_float16_supported = sim::Float16;
  table->is_bfloat16_supported = sim::BFloat16Supported;
#endif
  sim::RegisterKernels();
}
