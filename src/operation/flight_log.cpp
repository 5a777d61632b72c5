#include "operation/flight_log.hpp"

#include "operation/operation.hpp"

namespace troupe::detail {

namespace {

flight_progress end_of(const part& p, bool was_issued) noexcept {
  if (was_issued && !p.of->failed())
    return {flight_state::done};
  flight_progress result{was_issued ? flight_state::failed : flight_state::not_issued};
  if (auto cause = failure_of(p.of->cause())) {
    result.error = cause->code;
    result.native_code = cause->native_code;
  }
  return result;
}

} // namespace

void flight_log::issuing(part& p, std::uint64_t generation, std::int64_t now) noexcept {
  auto x = p.of->record_of(p);
  x.generation = generation;
  x.issued_at = now;
  x.progress = {flight_state::issuing};
  p.record = ring_.add(x);
}

void flight_log::issued(const part& p) noexcept { ring_.advance(p.record, {flight_state::issued}); }

void flight_log::started(const part& p, std::int64_t now) noexcept {
  ring_.advance(p.record, {flight_state::started}, now);
}

void flight_log::over(part& p, bool was_issued, std::uint64_t generation,
                      std::int64_t now) noexcept {
  auto end = end_of(p, was_issued);
  if (p.record != 0)
    return ring_.advance(p.record, end, now);
  auto x = p.of->record_of(p);
  x.generation = generation;
  x.over_at = now;
  if (x.progress.state == flight_state::not_called)
    end.state = flight_state::not_called;
  x.progress = end;
  p.record = ring_.add(x);
}

} // namespace troupe::detail
