#include "support/launches.hpp"

#include "support/expect.hpp"

#include <csignal>
#include <cstring>
#include <stdexcept>

namespace troupe::testing {

namespace {

constexpr const char* nothing = "troupe.testing.nothing";
constexpr const char* failure_name = "troupe.testing.failure";
constexpr const char* exception = "troupe.testing.exception";
constexpr const char* host_exception = "troupe.testing.host_exception";
constexpr const char* death = "troupe.testing.death";
constexpr const char* write = "troupe.testing.write";
constexpr const char* copy_name = "troupe.testing.copy";

std::string text_of(std::span<const std::byte> x) {
  return {reinterpret_cast<const char*>(x.data()), x.size()};
}

std::vector<std::uint8_t> bytes_of_text(const std::string& x) { return {x.begin(), x.end()}; }

/// Workers run the same program, so the launches are registered there too.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(nothing, [](launch_context& context, auto, auto, auto) {
    return context.run_on_host([] {});
  }));
  must(register_launch(failure_name, [](launch_context&, auto, auto, auto text) {
    return make_error(errc::invalid_argument, text_of(text));
  }));
  must(register_launch(exception, [](launch_context&, auto, auto, auto text) -> caf::error {
    throw std::runtime_error(text_of(text));
  }));
  must(register_launch(host_exception, [](launch_context& context, auto, auto, auto text) {
    return context.run_on_host([what = text_of(text)] { throw std::runtime_error(what); });
  }));
  must(register_launch(death, [](launch_context&, auto, auto, auto) {
    ::raise(SIGKILL);
    return caf::error{};
  }));
  must(register_launch(write, [](launch_context& context, auto, auto writes, auto content) {
    auto* to = must(writes.front().access());
    return context.run_on_host(
        [to, content = std::vector<std::byte>{content.begin(), content.end()}] {
          std::memcpy(to, content.data(), content.size());
        });
  }));
  must(register_launch(copy_name, [](launch_context& context, auto reads, auto writes, auto) {
    return context.run_on_host(
        [to = must(writes.front().access()), from = must(reads.front().access()),
         size = reads.front().size_bytes()] { std::memcpy(to, from, size); });
  }));
  return true;
}();

} // namespace

pending<void> launch_nothing(const device& on, std::vector<any_gpu_ref> reads,
                             std::vector<any_gpu_ref> writes, request_options options) {
  return on.launch(nothing, {}, std::move(reads), std::move(writes), options);
}

pending<void> launch_failure(const device& on, const std::string& text,
                             std::vector<any_gpu_ref> writes, request_options options) {
  return on.launch(failure_name, bytes_of_text(text), {}, std::move(writes), options);
}

pending<void> launch_exception(const device& on, const std::string& text) {
  return on.launch(exception, bytes_of_text(text), {}, {});
}

pending<void> launch_host_exception(const device& on, const std::string& text) {
  return on.launch(host_exception, bytes_of_text(text), {}, {});
}

pending<void> launch_death(const device& on) { return on.launch(death, {}, {}, {}); }

pending<void> launch_write(const device& on, const any_gpu_ref& to,
                           std::span<const std::byte> content) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(content.data());
  return on.launch(write, {bytes, bytes + content.size()}, {}, {to});
}

pending<void> launch_copy(const device& on, const any_gpu_ref& to, const any_gpu_ref& from) {
  return on.launch(copy_name, {}, {from}, {to});
}

} // namespace troupe::testing
