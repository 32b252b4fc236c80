// A second device for tests, "fakegpu": its memory is host memory and its kernels are those of the CPU, but torch treats
// it as a device of its own. An operation on tensors of both devices fails as it does with a GPU, and what the host must
// wait for is counted, or refused.
//
// Copies with non_blocking=True from the device to pinned host memory arrive only when somebody synchronizes: a program
// that reads them earlier reads 0x7f bytes, as one on a GPU may read anything.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_set>

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kFake, 0);

// ---------------------------------------------------------------- what the host waits for

std::atomic<int64_t> synchronizations{0}, live_nbytes{0}, peak_nbytes{0};
std::atomic<bool> refusing{false};

// The device's clock: operations started. It is always kLag operations behind the host, so an event is not done, and a
// copy not there, while the host does little after it.
std::atomic<int64_t> started{0};
constexpr int64_t kLag = 25;

struct PendingCopy {
  at::Tensor target;       // pinned, on the CPU
  std::vector<char> bytes; // what the device held when the copy was started
  int64_t at;              // the device's clock when it was started
};
std::mutex pending_mutex;
std::vector<PendingCopy> pending;

template <typename Wanted>
void finish_copies_if(const Wanted& wanted) {
  std::lock_guard<std::mutex> lock(pending_mutex);
  std::vector<PendingCopy> others;
  for (auto& copy : pending) {
    if (!wanted(copy)) {
      others.push_back(std::move(copy));
      continue;
    }
    std::memcpy(copy.target.mutable_data_ptr(), copy.bytes.data(), copy.bytes.size());
  }
  pending = std::move(others);
}

void finish_copies() {
  finish_copies_if([](const PendingCopy&) { return true; });
}

// Whether the device has done what was started up to `at`.
bool is_done(int64_t at) {
  if (started < at + kLag) {
    return false;
  }
  finish_copies_if([at](const PendingCopy& copy) { return copy.at <= at; });
  return true;
}

void synchronize(const char* what) {
  TORCH_CHECK(!refusing, "fakegpu: the host waits for the device in a place where it must not: ", what);
  ++synchronizations;
  finish_copies();
}

// ---------------------------------------------------------------- memory

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes ? c10::alloc_cpu(nbytes + kHeader) : nullptr;
    if (data) {
      *static_cast<size_t*>(data) = nbytes;
      const int64_t live = live_nbytes += static_cast<int64_t>(nbytes);
      int64_t peak = peak_nbytes;
      while (live > peak && !peak_nbytes.compare_exchange_weak(peak, live)) {
      }
      return {static_cast<char*>(data) + kHeader, data, &release, kDevice};
    }
    return {nullptr, nullptr, &release, kDevice};
  }
  static void release(void* data) {
    if (data) {
      live_nbytes -= static_cast<int64_t>(*static_cast<size_t*>(data));
      c10::free_cpu(data);
    }
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
  static constexpr size_t kHeader = 64;
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kFake, &device_allocator);

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_blocks;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = c10::alloc_cpu(nbytes ? nbytes : 1);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks[static_cast<const char*>(data)] = nbytes ? nbytes : 1;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_blocks.erase(static_cast<const char*>(data));
    }
    c10::free_cpu(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned_address(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned_blocks.upper_bound(static_cast<const char*>(data));
  if (next == pinned_blocks.begin()) {
    return false;
  }
  --next;
  return static_cast<const char*>(data) < next->first + next->second;
}

// ---------------------------------------------------------------- streams, events, random numbers

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> streams{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kFake;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "fakegpu has one device, and ", device, " was asked for");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, 0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, ++streams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto old = current_stream;
    current_stream = stream.id();
    return c10::Stream(c10::Stream::UNSAFE, kDevice, old);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(started + 1); // 0 is an event that nobody has recorded
  }
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void* event) const override {
    return !event || is_done(reinterpret_cast<int64_t>(event) - 1);
  }
  bool queryStream(const c10::Stream&) const override {
    return is_done(started);
  }
  void synchronizeStream(const c10::Stream&) const override {
    synchronize("stream.synchronize()");
  }
  void synchronizeEvent(void* event) const override {
    if (!queryEvent(event)) {
      synchronize("event.synchronize()");
    }
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    synchronize("synchronize()");
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct FakeGenerator final : c10::GeneratorImpl {
  explicit FakeGenerator(at::Generator numbers)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), numbers(std::move(numbers)) {}
  void set_current_seed(uint64_t seed) override {
    numbers.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "fakegpu's generators have no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "fakegpu's generators have no offset");
  }
  uint64_t current_seed() const override {
    return numbers.current_seed();
  }
  uint64_t seed() override {
    return const_cast<at::Generator&>(numbers).seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    numbers.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    return new FakeGenerator(numbers.clone());
  }
  at::Generator numbers; // a generator of the CPU
};

at::Generator new_generator() {
  return at::make_generator<FakeGenerator>(at::detail::createCPUGenerator());
}

const at::Generator& default_generator() {
  static at::Generator generator = new_generator();
  return generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned_address(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  at::Device getDeviceFromPtr(void*) const override {
    return kDevice;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return new_generator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DataPtr fresh = device_allocator.allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept) {
      std::memcpy(fresh.mutable_get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
  }
};

// ---------------------------------------------------------------- tensors of the CPU on the device's memory, and back

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFake;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (tensor.is_sparse()) {
    auto sparse = at::_sparse_coo_tensor_unsafe(
        cpu_alias(tensor._indices()), cpu_alias(tensor._values()), tensor.sizes());
    return sparse._coalesced_(tensor.is_coalesced());
  }
  const auto& storage = tensor.storage();
  c10::Storage shared(
      c10::Storage::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)),
      c10::GetAllocator(c10::kCPU),
      /*resizable=*/true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

c10::Storage device_storage(const c10::Storage& storage) {
  auto* owner = new c10::Storage(storage);
  auto deleter = [](void* owner) { delete static_cast<c10::Storage*>(owner); };
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), owner, deleter, kDevice),
      &device_allocator,
      /*resizable=*/true);
}

at::SparseTensorImpl* sparse_impl(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

struct Argument {
  at::Tensor device, cpu;
};

at::Tensor device_tensor(const at::Tensor& cpu, const std::vector<Argument>& arguments) {
  if (!cpu.defined()) {
    return cpu;
  }
  if (cpu.is_sparse()) {
    auto sparse = at::_sparse_coo_tensor_unsafe(
        device_tensor(cpu._indices(), arguments), device_tensor(cpu._values(), arguments), cpu.sizes());
    return sparse._coalesced_(cpu.is_coalesced());
  }
  c10::Storage storage;
  for (const auto& argument : arguments) { // a view of an argument shares its storage
    if (!argument.device.is_sparse() && cpu.storage().data() && cpu.storage().data() == argument.device.storage().data()) {
      storage = argument.device.storage();
    }
  }
  if (!storage) {
    storage = device_storage(cpu.storage());
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), cpu.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  return tensor;
}

// An argument that the operation has written: its memory is shared, but its size may be new (out=, sparse tensors).
void write_back(const Argument& argument) {
  const auto& [device, cpu] = argument;
  if (cpu.is_sparse()) {
    auto* impl = sparse_impl(device);
    impl->resize_(cpu.sparse_dim(), cpu.dense_dim(), cpu.sizes());
    impl->set_indices_and_values_unsafe(device_tensor(cpu._indices(), {}), device_tensor(cpu._values(), {}));
    impl->set_coalesced(cpu.is_coalesced());
    return;
  }
  auto* impl = device.unsafeGetTensorImpl();
  if (cpu.storage().data() != device.storage().data()) {
    impl->set_storage_keep_dtype(device_storage(cpu.storage()));
  }
  if (cpu.sizes() != device.sizes() || cpu.strides() != device.strides()) {
    impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
}

// Operations with arguments that may be on the CPU also where the others are on a GPU.
const std::unordered_set<std::string> kTakesHostTensors = {
    "aten::index.Tensor",
    "aten::index.Tensor_out",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_pack_padded_sequence",
    "aten::tensor_split.tensor_indices_or_sections",
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++started;
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  const auto name = c10::toString(op.operator_name());
  std::vector<Argument> arguments;
  std::vector<int> written; // positions in `arguments`
  std::map<size_t, at::Tensor> by_position;

  auto taken = [&](const at::Tensor& tensor, const c10::Argument& formal) -> at::Tensor {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!on_device(tensor)) {
      TORCH_CHECK(
          tensor.dim() == 0 || kTakesHostTensors.count(name) || tensor.device().type() != c10::kCPU,
          "Expected all tensors to be on the same device, but argument ", formal.name(), " of ", name,
          " is on cpu and others are on fakegpu");
      return tensor;
    }
    arguments.push_back({tensor, cpu_alias(tensor)});
    if (formal.alias_info() && formal.alias_info()->isWrite()) {
      written.push_back(static_cast<int>(arguments.size()) - 1);
    }
    return arguments.back().cpu;
  };

  for (size_t position = 0; position < count; ++position) {
    auto& value = (*stack)[begin + position];
    const auto& formal = schema.arguments()[position];
    if (value.isTensor()) {
      by_position[position] = value.toTensor();
      value = taken(value.toTensor(), formal);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(taken(tensor, formal));
      }
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(taken(*tensor, formal)) : std::nullopt);
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().type() == kFake) {
      value = static_cast<FakeGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())->numbers;
    } else if (value.isNone() && formal.type()->str().find("Generator") != std::string::npos) {
      value = static_cast<FakeGenerator*>(default_generator().unsafeGetGeneratorImpl())->numbers;
    }
  }

  const bool sparse = std::any_of(
      arguments.begin(), arguments.end(), [](const Argument& argument) { return argument.cpu.is_sparse(); });
  op.redispatchBoxed(c10::DispatchKeySet(sparse ? c10::DispatchKey::SparseCPU : c10::DispatchKey::CPU), stack);

  for (int position : written) {
    write_back(arguments[position]);
  }
  const auto returns = schema.returns().size();
  const auto first = stack->size() - returns;
  for (size_t index = 0; index < returns; ++index) {
    auto& value = (*stack)[first + index];
    const auto* alias = schema.returns()[index].alias_info();
    if (value.isTensor()) {
      at::Tensor result = device_tensor(value.toTensor(), arguments);
      if (alias && alias->isWrite()) { // the argument itself
        for (size_t position = 0; position < count; ++position) {
          const auto* formal = schema.arguments()[position].alias_info();
          if (formal && *formal == *alias && by_position.count(position)) {
            result = by_position[position];
          }
        }
      }
      value = std::move(result);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(device_tensor(tensor, arguments));
      }
      value = std::move(list);
    }
  }
}

// ---------------------------------------------------------------- operations of its own

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  const size_t nbytes = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.dtype().itemsize(), self.storage_offset());
  if (self.numel() && nbytes > self.storage().nbytes()) {
    Hooks().resizePrivateUse1Bytes(self.storage(), nbytes);
  }
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true));
  impl->set_sizes_contiguous({0});
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.guard_int(__FILE__, __LINE__));
  }
  const size_t nbytes = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.dtype().itemsize(), self.storage_offset());
  if (self.numel() && nbytes > self.storage().nbytes()) {
    Hooks().resizePrivateUse1Bytes(self.storage(), nbytes);
  }
  return self;
}

at::Tensor& set_storage_whole(at::Tensor& self, at::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({count});
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const at::Tensor source_alias = on_device(self) ? cpu_alias(self) : self;
  const bool to_host = on_device(self) && !on_device(target);
  if (to_host && non_blocking && target.is_contiguous() && is_pinned_address(target.const_data_ptr())) {
    const at::Tensor values = source_alias.to(target.scalar_type()).expand(target.sizes()).contiguous();
    PendingCopy copy{target, std::vector<char>(values.nbytes()), started};
    if (values.nbytes()) {
      std::memcpy(copy.bytes.data(), values.const_data_ptr(), values.nbytes());
      std::memset(target.mutable_data_ptr(), 0x7f, values.nbytes());
    }
    std::lock_guard<std::mutex> lock(pending_mutex);
    pending.push_back(std::move(copy));
    return target;
  }
  if (!on_device(self)) {
    const auto* storage = self.storage().unsafeGetStorageImpl(); // what earlier copies put there comes first
    finish_copies_if([storage](const PendingCopy& copy) { return copy.target.storage().unsafeGetStorageImpl() == storage; });
  }
  if (to_host) {
    synchronize("a copy to the host");
  } else if (!on_device(self) && !(non_blocking && is_pinned_address(self.const_data_ptr())) && self.dim() > 0) {
    synchronize("a copy from pageable host memory");
  }
  at::Tensor target_alias = on_device(target) ? cpu_alias(target) : target;
  target_alias.copy_(source_alias);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize("item()");
  return cpu_alias(self).item();
}

void record_stream(at::Tensor&, c10::Stream) {}

void synchronizes(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  synchronize(op.schema().name().c_str());
  run_on_cpu(op, stack);
}

// Dense tensors of the CPU and of the device may take each other's place (`parameter.data = ...`), as with a GPU.
bool may_become(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == from.layout();
}

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  TORCH_CHECK(on_device(input) && on_device(weight), "Expected all tensors of the convolution to be on fakegpu");
  const auto offset = bias && bias->defined() ? std::optional<at::Tensor>(cpu_alias(*bias)) : std::nullopt;
  return device_tensor(
      at::convolution(
          cpu_alias(input), cpu_alias(weight), offset, stride, padding, dilation, transposed, output_padding, groups),
      {});
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  TORCH_CHECK(on_device(gradient) && on_device(input), "Expected all tensors of the convolution to be on fakegpu");
  const int64_t bias_size = gradient.size(1);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      cpu_alias(gradient), cpu_alias(input), cpu_alias(weight), at::OptionalIntArrayRef({bias_size}), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  return {device_tensor(of_input, {}), device_tensor(of_weight, {}), device_tensor(of_bias, {})};
}

at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// torch runs an LSTM or a GRU on such a device by one fused operation a step (equations of torch.nn.LSTM and torch.nn.GRU).
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input,
    const at::Tensor& hidden,
    const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  const auto gates = (with_bias(input, input_bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
  const auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const auto next = f * cell + i * g;
  return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& of_hidden,
    const std::optional<at::Tensor>& of_cell,
    const at::Tensor& cell,
    const at::Tensor& next,
    const at::Tensor& activated,
    bool has_bias) {
  const auto gates = activated.chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const auto squashed = next.tanh();
  const auto hidden = of_hidden && of_hidden->defined() ? *of_hidden : at::zeros_like(next);
  auto total = hidden * o * (1 - squashed * squashed);
  total = of_cell && of_cell->defined() ? total + *of_cell : total;
  const auto of_gates = at::cat(
      {total * g * i * (1 - i), total * cell * f * (1 - f), total * i * (1 - g * g), hidden * squashed * o * (1 - o)}, 1);
  return {of_gates, total * f, has_bias ? of_gates.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input,
    const at::Tensor& hidden,
    const at::Tensor& state,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  const auto of_input = with_bias(input, input_bias).chunk(3, 1), of_hidden = with_bias(hidden, hidden_bias).chunk(3, 1);
  const auto r = (of_input[0] + of_hidden[0]).sigmoid(), z = (of_input[1] + of_hidden[1]).sigmoid();
  const auto n = (of_input[2] + r * of_hidden[2]).tanh();
  return {n + z * (state - n), at::cat({r, z, n, state, of_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &r = saved[0], &z = saved[1], &n = saved[2], &state = saved[3], &hidden = saved[4];
  const auto of_z = gradient * (state - n) * z * (1 - z), of_n = gradient * (1 - z) * (1 - n * n);
  const auto of_r = of_n * hidden * r * (1 - r);
  const auto of_input = at::cat({of_r, of_z, of_n}, 1), of_hidden = at::cat({of_r, of_z, of_n * r}, 1);
  const auto none = at::Tensor();
  return {of_input, of_hidden, gradient * z, has_bias ? of_input.sum(0) : none, has_bias ? of_hidden.sum(0) : none};
}

at::Tensor sparse_tensor(
    int64_t sparse_dim,
    int64_t dense_dim,
    c10::SymIntArrayRef size,
    const at::Tensor& indices,
    const at::Tensor& values,
    std::optional<at::ScalarType>,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<bool> coalesced) {
  auto tensor = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), values.dtype());
  auto* impl = sparse_impl(tensor);
  impl->resize_(sparse_dim, dense_dim, C10_AS_INTARRAYREF_SLOW(size));
  impl->set_indices_and_values_unsafe(indices.alias(), values.alias());
  impl->set_coalesced(coalesced.value_or(false));
  return tensor;
}

at::Tensor sparse_empty(
    int64_t sparse_dim,
    int64_t dense_dim,
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  auto tensor = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), at::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)));
  sparse_impl(tensor)->resize_(sparse_dim, dense_dim, size);
  return tensor;
}

at::Tensor sparse_indices(const at::Tensor& self) {
  return sparse_impl(self)->indices();
}
at::Tensor sparse_values(const at::Tensor& self) {
  return sparse_impl(self)->values();
}
int64_t sparse_nnz(const at::Tensor& self) {
  return sparse_impl(self)->nnz();
}
int64_t sparse_dimensions(const at::Tensor& self) {
  return sparse_impl(self)->sparse_dim();
}
int64_t dense_dimensions(const at::Tensor& self) {
  return sparse_impl(self)->dense_dim();
}
bool sparse_is_coalesced(const at::Tensor& self) {
  return sparse_impl(self)->coalesced();
}
at::Tensor& sparse_set_coalesced(at::Tensor& self, bool coalesced) {
  sparse_impl(self)->set_coalesced(coalesced);
  return self;
}

void register_hooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

} // namespace

TORCH_LIBRARY(fakegpu, m) {
  m.def("register_hooks() -> ()", &register_hooks);
  m.def("synchronizations() -> int", [] { return synchronizations.load(); });
  m.def("live_nbytes() -> int", [] { return live_nbytes.load(); });
  m.def("peak_nbytes() -> int", [] { return peak_nbytes.load(); });
  m.def("reset_peak() -> ()", [] { peak_nbytes = live_nbytes.load(); });
  m.def("refuse(bool on) -> ()", [](bool on) { refusing = on; });
  m.def("seed(int seed) -> ()", [](int64_t seed) { const_cast<at::Generator&>(default_generator()).set_current_seed(seed); });
  m.def("get_state() -> Tensor", [] { return default_generator().get_state(); });
  m.def("set_state(Tensor state) -> ()", [](const at::Tensor& state) { const_cast<at::Generator&>(default_generator()).set_state(state); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &may_become);
  m.impl("convolution_overrideable", &convolution);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  for (const char* name : {"nonzero", "equal", "masked_select", "unique_dim", "_unique2"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&synchronizes>());
  }
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &sparse_tensor);
  m.impl("_sparse_coo_tensor_with_dims", &sparse_empty);
  m.impl("_indices", &sparse_indices);
  m.impl("_values", &sparse_values);
  m.impl("_nnz", &sparse_nnz);
  m.impl("sparse_dim", &sparse_dimensions);
  m.impl("dense_dim", &dense_dimensions);
  m.impl("is_coalesced", &sparse_is_coalesced);
  m.impl("_coalesced_", &sparse_set_coalesced);
}

// ---------------------------------------------------------------- autocast, by torch's own lists

using namespace at::autocast;

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(OP, ...) KERNEL_PRIVATEUSEONE(OP, __VA_OPT__(__VA_ARGS__, ) lower_precision_fp)
#define FULL(OP, ...) KERNEL_PRIVATEUSEONE(OP, __VA_OPT__(__VA_ARGS__, ) fp32)
#define WIDEST(OP, ...) KERNEL_PRIVATEUSEONE(OP, __VA_OPT__(__VA_ARGS__, ) promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_PROMOTE(WIDEST)
}
