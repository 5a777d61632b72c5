/// Requests that are made again if a loss ends them (`request_options::max_retries`).
#pragma once

#include "operation/operation.hpp"
#include "operation/retry_record.hpp"
#include "runtime/retry_queue.hpp"
#include "runtime/runtime.hpp"
#include <troupe/collective.hpp>
#include <troupe/error.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

namespace troupe::detail {

/// Returns the error that refuses a request of this kind if `options` say that it may be made
/// again.
/// @errors errc::not_supported
caf::error check_no_retries(std::string_view verb, const request_options& options);

/// The attempts of a request, one after the other. The request itself is another operation, without
/// parts, which gets the result of the last attempt.
class request_attempts : public retryable {
public:
  std::uint64_t key() const noexcept override { return record_->key(); }
  std::shared_ptr<operation> next_attempt() override;
  void on_admitted(const std::shared_ptr<operation>& attempt) override;
  void on_refused(const caf::error& why) override;

protected:
  request_attempts(std::shared_ptr<runtime> owner, const request_options& options)
      : owner_(std::move(owner)), options_(options),
        record_(owner_->admissions().new_retry_record()) {}

  /// Returns the request.
  virtual operation& request() noexcept = 0;
  /// Returns this object, kept by its owner.
  virtual std::shared_ptr<request_attempts> self() = 0;
  /// Makes an operation of the request.
  virtual std::shared_ptr<operation> make() = 0;

  /// Starts the first attempt.
  void start(const std::shared_ptr<operation>& first);
  /// Ends the request before its work is over. `why`: for a request that has no attempt now.
  void end_early(early_end how, failure why) noexcept;
  /// Returns the attempt that was admitted last.
  std::shared_ptr<operation> last_attempt() const;
  /// Forgets what is needed to make attempts: the request is answered.
  void end() noexcept;
  std::uint64_t number() const noexcept { return number_; }

private:
  /// `making`: the next attempt has been made, and is being admitted.
  enum class stage : std::uint8_t { attempted, waiting, making };

  void on_answer_of(const operation& attempt);
  static void end_attempt(operation& attempt, early_end how) noexcept;
  bool may_go_on(const caf::error& why) const noexcept;
  caf::error final_error(const caf::error& why) const;

  const std::shared_ptr<runtime> owner_;
  const request_options options_;
  const std::shared_ptr<retry_record> record_;
  std::uint64_t number_ = 0; ///< of the first attempt, or of the request that it repeats
  mutable std::mutex mutex_;
  // under mutex_
  stage stage_ = stage::attempted;
  std::shared_ptr<operation> attempt_; ///< the one that was admitted last; null: see `stage_`
  std::optional<early_end> ended_;     ///< by its requester or its deadline
  // Changed between attempts, by one thread after the other:
  caf::error loss_;          ///< the first one that ended an attempt
  std::uint64_t issued_ = 0; ///< how many attempts were issued, of those that a loss has ended
};

template <class T> class retried_request final : public operation_of<T>, public request_attempts {
public:
  using maker = std::function<std::shared_ptr<operation_of<T>>()>;

  retried_request(const char* verb, std::shared_ptr<runtime> owner, const request_options& options,
                  maker make)
      : operation_of<T>(verb, 0), request_attempts(std::move(owner), options),
        make_(std::move(make)) {}

  std::uint64_t number() const noexcept override { return request_attempts::number(); }
  void start(const std::shared_ptr<operation_of<T>>& first) {
    this->deadline = first->deadline;
    request_attempts::start(first);
  }

protected:
  operation& request() noexcept override { return *this; }
  std::shared_ptr<request_attempts> self() override {
    return std::static_pointer_cast<retried_request>(this->shared_from_this());
  }
  std::shared_ptr<operation> make() override {
    maker make;
    {
      std::lock_guard lock{make_mutex_};
      make = make_;
    }
    return make ? make() : nullptr;
  }
  void end_early(early_end how) noexcept override {
    request_attempts::end_early(how, this->early_failure(how));
  }
  /// Only the thread whose answer counts writes `value`.
  void before_answer(const caf::error& error) noexcept override {
    const auto attempt = last_attempt();
    if (!error)
      this->value = std::static_pointer_cast<operation_of<T>>(attempt)->value;
    else if (attempt) // it does not use memory of the requester any more once it is answered
      attempt->answer(error);
    maker gone; // it holds memory of the requester
    std::lock_guard lock{make_mutex_};
    gone.swap(make_);
  }
  void after_answer() noexcept override { end(); }

private:
  std::mutex make_mutex_;
  maker make_; ///< null once the request is answered
};

/// Starts the request whose operations `make` makes; `first` is the first one, with its deadline.
/// If it may be made again after a loss, the result is another operation.
/// @errors errc::invalid_argument: it must not be made again
template <class T, class Make>
std::shared_ptr<operation_of<T>> start_retried(const std::shared_ptr<runtime>& owner,
                                               const std::shared_ptr<operation_of<T>>& first,
                                               const request_options& options, Make make) {
  if (auto error = check_may_repeat(*first))
    return refused_operation<T>(first->verb(), std::move(error));
  auto result =
      std::make_shared<retried_request<T>>(first->verb(), owner, options, std::move(make));
  result->start(first);
  return result;
}

} // namespace troupe::detail
