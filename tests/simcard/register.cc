// Enters kernels into Paddle's tables. See launch.h.
#include "launch.h"

#include <mutex>
#include <set>

#include "paddle/phi/core/custom_kernel.h"
#include "paddle/phi/core/kernel_factory.h"

namespace sim {

void RegisterActivations();
void RegisterNetwork();
void RegisterMath();
void RegisterShapes();
void RegisterOptimizers();
void RegisterSyncBatchNorm();

namespace {

std::set<std::string> g_native, g_refused;  // names, for tests
std::string g_listed;

phi::Backend SimBackend() {
  size_t number = phi::CustomRegisteredDeviceMap::Instance().GetOrRegisterGlobalDeviceTypeId("sim");
  return static_cast<phi::Backend>(static_cast<size_t>(phi::Backend::NUM_BACKENDS) + number);
}

}  // namespace

const phi::Kernel* FindCpuKernel(const char* name, DataType type, bool writes_parts, bool* widened) {
  auto& factory = phi::KernelFactory::Instance();
  auto find = [&](DataType of) -> const phi::Kernel* {
    phi::KernelKey key(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, of);
    return factory.HasKernel(name, key) ? &factory.SelectKernel(name, key) : nullptr;
  };
  if (type != DataType::FLOAT16 && type != DataType::BFLOAT16) return find(type);
  if (Lacks(type == DataType::FLOAT16 ? "float16" : "bfloat16")) return nullptr;
  const phi::Kernel *same = find(type), *wide = find(DataType::FLOAT32);
  if (same) {
    bool told_type = false;  // it fills or casts to the type that an attribute says
    for (const auto& attribute : same->args_def().attribute_defs())
      told_type = told_type || attribute.type_index == phi::AttributeType::DATA_TYPE;
    if (told_type || writes_parts || !wide) return same;
  }
  *widened = wide != nullptr;
  return wide;
}

void NotInGraphs(phi::KernelContext*) {
  PADDLE_THROW(phi::errors::Unimplemented("the simulated card runs dynamic graphs only"));
}

bool SameArguments(const char* name, const phi::KernelArgsDef& declared, const phi::KernelArgsDef& cpu) {
  bool same = declared.input_defs().size() == cpu.input_defs().size() &&
              declared.attribute_defs().size() == cpu.attribute_defs().size() &&
              declared.output_defs().size() == cpu.output_defs().size();
  for (size_t i = 0; same && i < cpu.input_defs().size(); ++i)
    same = declared.input_defs()[i].type_index == cpu.input_defs()[i].type_index;
  for (size_t i = 0; same && i < cpu.attribute_defs().size(); ++i)
    same = declared.attribute_defs()[i].type_index == cpu.attribute_defs()[i].type_index;
  for (size_t i = 0; same && i < cpu.output_defs().size(); ++i)
    same = declared.output_defs()[i].type_index == cpu.output_defs()[i].type_index;
  if (!same && g_refused.insert(name).second) Trace("refused", R"("name":"%s")", name);
  return same;
}

void Enter(const char* name, DataType type, phi::Kernel kernel, const phi::KernelArgsDef& adopted) {
  auto* def = kernel.mutable_args_def();
  auto adopt = [&](auto& mine, const auto& theirs) {
    for (size_t i = 0; i < mine.size(); ++i) {
      mine[i].backend = theirs[i].backend == phi::Backend::CPU ? SimBackend() : theirs[i].backend;
      if (theirs[i].dtype == DataType::UNDEFINED || theirs[i].dtype == DataType::ALL_DTYPE) mine[i].dtype = theirs[i].dtype;
    }
  };
  adopt(def->input_defs(), adopted.input_defs());
  adopt(def->output_defs(), adopted.output_defs());
  g_native.insert(name);
  phi::KernelKey key(SimBackend(), phi::DataLayout::ALL_LAYOUT, type);
  phi::CustomKernelMap::Instance().RegisterCustomKernel(name, key, kernel);
}

void RegisterKernels() {
  RegisterActivations();
  RegisterNetwork();
  RegisterMath();
  RegisterShapes();
  RegisterOptimizers();
  RegisterSyncBatchNorm();
}

}  // namespace sim

// The names of the kernels that run on the card, with spaces between them. Others fall back to the CPU.
extern "C" const char* sim_kernels() {
  if (sim::g_listed.empty())
    for (const auto& name : sim::g_native) sim::g_listed += (sim::g_listed.empty() ? "" : " ") + name;
  return sim::g_listed.c_str();
}
