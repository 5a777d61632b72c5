#include "compute/blas/lt_products.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "compute/blas/lru_cache.hpp"
#include "compute/blas/lt_plan.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace troupe::blas {

namespace {

constexpr std::size_t most_plans = 4096;
constexpr std::size_t most_plan_bytes = std::size_t{8} << 20;
constexpr std::size_t most_repeated = 1024;
constexpr std::size_t most_repeated_bytes = std::size_t{16} << 20;

/// Whether products that are repeated are launched by their kernels.
std::atomic<bool> replays = false;

/// Returns the bytes of a key without padding.
template <class Key> std::string bytes_of(const Key& key) {
  std::string result(sizeof key, '\0');
  std::memcpy(result.data(), &key, sizeof key);
  return result;
}

/// A product that was enqueued before with the same memory. Its kernel is launched without
/// cuBLASLt, which takes twice as long.
struct repeated_product {
  explicit repeated_product(std::shared_ptr<const lt_plan> x) : plan(std::move(x)) {}
  /// Returns about how much memory it takes, with the graph of its kernel.
  static std::size_t size_bytes() noexcept {
    return sizeof(repeated_product) + (std::size_t{8} << 10);
  }

  const std::shared_ptr<const lt_plan> plan; ///< its address is part of the key
  std::uint64_t times = 0;
  std::unique_ptr<const detail::kernel_replay> kernel; ///< null: cuBLASLt launches it
};

/// The handle of cuBLASLt on a device, and its plans.
class lt_products final : public library_state {
public:
  explicit lt_products(caf::error why_none) : why_none_(std::move(why_none)) {}
  lt_products(const lt_functions& lt, cublasLtHandle_t handle) : lt_(&lt), handle_(handle) {}
  ~lt_products() override {
    trim();
    if (handle_ != nullptr)
      static_cast<void>(lt_->cublasLtDestroy(handle_)); // the device is at rest
  }
  lt_products(const lt_products&) = delete;
  lt_products& operator=(const lt_products&) = delete;

  void trim() noexcept override {
    repeated_.clear();
    latest_.reset();
    plans_.clear();
  }

  const lt_functions& lt() const noexcept { return *lt_; }
  cublasLtHandle_t handle() const noexcept { return handle_; }

  /// Returns the plan of such products.
  caf::expected<std::shared_ptr<const lt_plan>> plan_of(const product& x,
                                                        const product_memory& memory) {
    if (handle_ == nullptr)
      return why_none_;
    const plan_key key{x, alignments_of(x, memory)};
    if (latest_ && key == latest_key_) // often the same for many products
      return latest_;
    auto bytes = bytes_of(key);
    latest_ = plans_.find(bytes);
    if (!latest_) {
      auto made = lt_plan::make(*lt_, handle_, x, key.aligned);
      if (!made)
        return made.error();
      latest_ = std::move(*made);
      plans_.add(std::move(bytes), latest_);
    }
    latest_key_ = key;
    return latest_;
  }

  /// Enqueues a product with its workspace `room`.
  caf::error enqueue(const std::shared_ptr<const lt_plan>& plan, const product& x,
                     const product_memory& memory, void* room, const launch_context& context) {
    const auto stream = context.cuda_stream();
    const auto by_cublas = [&] {
      if (auto error = plan->set_addresses(x, memory))
        return error;
      auto* const d = memory.d.front().address;
      return plan->enqueue(handle_, x, memory.b.front().address, memory.a.front().address,
                           x.reads_c ? memory.c.front().address : d, d, room, stream);
    };
    if (!replays.load(std::memory_order_relaxed))
      return by_cublas();
    auto& before = repeated_of(plan, x, memory, room);
    if (++before.times == 2) // its kernel is loaded
      before.kernel = lt_->capture(stream, by_cublas);
    if (before.kernel)
      return detail::check(before.kernel->launch(stream), "cuLaunchKernelEx", context.device());
    return by_cublas();
  }

private:
  /// The values that a kernel's arguments depend on, beside the plan. No padding: it is compared as
  /// bytes.
  struct repeated_key {
    repeated_key(const lt_plan& plan, const product& x, const product_memory& memory,
                 const void* room)
        : all{&plan,
              room,
              memory.a.front().address,
              memory.b.front().address,
              x.reads_c ? memory.c.front().address : nullptr,
              memory.d.front().address} {
      for (std::size_t i = 0; i < extras; ++i)
        more[i] = memory.more[i] != nullptr ? memory.more[i]->address : nullptr;
      std::ranges::copy(x.alpha, alpha);
      std::ranges::copy(x.beta, beta);
    }
    const void* all[6];
    const void* more[extras];
    double alpha[2];
    double beta[2];
  };

  repeated_product& repeated_of(const std::shared_ptr<const lt_plan>& plan, const product& x,
                                const product_memory& memory, const void* room) {
    auto bytes = bytes_of(repeated_key{*plan, x, memory, room});
    if (auto found = repeated_.find(bytes))
      return *found;
    auto added = std::make_shared<repeated_product>(plan);
    repeated_.add(std::move(bytes), added);
    return *added;
  }

  /// The values that a plan depends on. No padding: it is compared as bytes.
  struct plan_key {
    plan_key() = default;
    /// Alpha and beta do not matter, except whether c is read.
    plan_key(const product& x, const alignments& by) : what(x), aligned(by) {
      std::ranges::fill(what.alpha, 0.0);
      std::ranges::fill(what.beta, 0.0);
      what.only_prepares = 0;
    }
    bool operator==(const plan_key& x) const noexcept {
      return std::memcmp(this, &x, sizeof x) == 0;
    }
    product what;
    alignments aligned{};
  };
  static_assert(sizeof(plan_key) == sizeof(product) + sizeof(alignments));

  const caf::error why_none_;
  const lt_functions* const lt_ = nullptr;
  const cublasLtHandle_t handle_ = nullptr;
  lru_cache<const lt_plan> plans_{most_plans, most_plan_bytes};
  lru_cache<repeated_product> repeated_{most_repeated, most_repeated_bytes};
  std::shared_ptr<const lt_plan> latest_;
  plan_key latest_key_;
};

/// Returns what the device of `context` has.
/// @errors errc::unavailable: it was opened before the library was loaded
caf::expected<lt_products*> products_of(const launch_context& context) {
  auto* const found = static_cast<lt_products*>(context.library(lt_library_name)); // made below
  if (found == nullptr)
    return make_error(errc::unavailable,
                      "troupe_blas was loaded after the device was opened: reset the device");
  return found;
}

std::size_t rounded(std::size_t bytes) noexcept {
  return (bytes + largest_alignment - 1) / largest_alignment * largest_alignment;
}

/// Runs a product once in the workspace. All its memory is the same part of it: what it computes
/// does not matter.
caf::error run_once(launch_context& context, cublasLtHandle_t handle, const product& x,
                    const product_memory& memory, const lt_plan& plan) {
  std::size_t most = 0;
  for (auto list : {memory.a, memory.b, memory.c, memory.d})
    for (auto& m : list)
      most = std::max(most, m.size_bytes());
  for (const auto* m : memory.more)
    if (m != nullptr)
      most = std::max(most, m->size_bytes());
  const auto own = rounded(plan.workspace_bytes());
  auto room = context.workspace(own + most);
  if (!room)
    return room.error();
  auto* const shared = static_cast<std::byte*>(*room) + own;
  const launch_memory anything{shared, most, dtype::uint8};
  auto there = memory;
  for (auto& m : there.more)
    if (m != nullptr)
      m = &anything;
  if (auto error = plan.set_addresses(x, there))
    return error;
  return plan.enqueue(handle, x, shared, shared, shared, shared, *room, context.cuda_stream());
}

/// Enqueues a product of matrices whose addresses go to the workspace first.
caf::error enqueue_by_address(launch_context& context, const lt_products& products,
                              const product& x, const product_memory& memory, const lt_plan& plan) {
  std::vector<std::uint64_t> addresses;
  for (auto list : {memory.a, memory.b, x.reads_c ? memory.c : memory.d, memory.d})
    for (auto& m : list)
      addresses.push_back(reinterpret_cast<std::uint64_t>(m.address));
  const auto own = rounded(plan.workspace_bytes());
  auto room = context.workspace(own + addresses.size() * sizeof(std::uint64_t));
  if (!room)
    return room.error();
  auto* const base = static_cast<std::byte*>(*room);
  const auto code = products.lt().write_words(reinterpret_cast<std::uint64_t*>(base + own),
                                              addresses, context.cuda_stream());
  if (auto error = detail::check(code, "cuLaunchKernel", context.device()))
    return error;
  if (auto error = plan.set_addresses(x, memory))
    return error;
  const auto list = [&](std::size_t i) { return base + own + i * memory.d.size() * sizeof(void*); };
  return plan.enqueue(products.handle(), x, list(1), list(0), list(2), list(3), base,
                      context.cuda_stream());
}

} // namespace

caf::expected<std::unique_ptr<library_state>> make_lt_products(launch_context& context) {
  using result = std::unique_ptr<library_state>;
  if (context.cuda_stream() == nullptr)
    return result{};
  const auto lt = load_lt();
  if (!lt)
    return result{std::make_unique<lt_products>(lt.error())};
  cublasLtHandle_t handle = nullptr;
  if (auto error = lt_error(**lt, (*lt)->cublasLtCreate(&handle), "cublasLtCreate"))
    return result{std::make_unique<lt_products>(std::move(error))};
  return lt_products_with(**lt, handle);
}

void replay_products(bool on) noexcept { replays.store(on); }

std::unique_ptr<library_state> lt_products_with(const lt_functions& lt, cublasLtHandle_t handle) {
  return std::make_unique<lt_products>(lt, handle);
}

caf::error prepare_by_lt(launch_context& context, const product& x, const product_memory& memory) {
  const auto products = products_of(context);
  if (!products)
    return products.error();
  const auto plan = (*products)->plan_of(x, memory);
  if (!plan)
    return plan.error();
  return x.only_prepares ? run_once(context, (*products)->handle(), x, memory, **plan)
                         : caf::error{};
}

caf::error enqueue_by_lt(launch_context& context, const product& x, const product_memory& memory) {
  const auto products = products_of(context);
  if (!products)
    return products.error();
  const auto plan = (*products)->plan_of(x, memory);
  if (!plan)
    return plan.error();
  if (x.by_address)
    return enqueue_by_address(context, **products, x, memory, **plan);
  void* room = nullptr;
  if ((*plan)->workspace_bytes() != 0) {
    auto memory_of_plan = context.workspace((*plan)->workspace_bytes());
    if (!memory_of_plan)
      return memory_of_plan.error();
    room = *memory_of_plan;
  }
  return (*products)->enqueue(*plan, x, memory, room, context);
}

} // namespace troupe::blas
