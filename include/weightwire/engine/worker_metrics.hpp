#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/engine/worker_status.hpp>

/// @file
/// What `/metrics` answers: Prometheus text, format 0.0.4.

namespace weightwire::detail {

/// Counts requests by route and status. Thread-safe; counting neither locks nor allocates.
class request_counters {
public:
    /// @param routes how many there are; all memory is taken here.
    explicit request_counters(std::size_t routes) : counts_(routes * statuses.size()) {}

    /// A status that is not listed counts as another: labels must stay few, whatever is answered.
    void count(std::size_t route, int status) noexcept {
        std::size_t column = 0;
        while (column + 1 < statuses.size() && statuses[column] != status) {
            ++column;
        }
        counts_[route * statuses.size() + column].fetch_add(1, std::memory_order_relaxed);
    }
    /// Calls `visit(route, status, count)` for each pair that was seen; status 0: any other.
    template <class Visit>
    void each(Visit visit) const {
        for (std::size_t i = 0; i < counts_.size(); ++i) {
            if (const auto seen = counts_[i].load(std::memory_order_relaxed); seen != 0) {
                // Most pairs never come, and a scrape would carry them all.
                visit(i / statuses.size(), statuses[i % statuses.size()], seen);
            }
        }
    }

private:
    /// What the service answers; the last column counts every other status.
    static constexpr std::array<int, 9> statuses{200, 400, 404, 405, 409, 500, 501, 503, 0};
    std::vector<std::atomic<std::uint64_t>> counts_;  ///< a row a route, a column a status
};

/// Writes one metric: its help, its type and its samples.
class metrics_writer {
public:
    /// Begins a metric. Its samples follow at once, as the format demands.
    /// @param type `counter` or `gauge`.
    /// @param help one line, without a backslash.
    void family(std::string_view name, std::string_view type, std::string_view help) {
        name_ = name;
        out_.append("# HELP ").append(name).append(" ").append(help).append("\n");
        out_.append("# TYPE ").append(name).append(" ").append(type).append("\n");
    }
    /// @param labels `{a="b"}` or nothing.
    void sample(std::string_view value, std::string_view labels = {}) {
        out_.append(name_).append(labels).append(" ").append(value).append("\n");
    }
    void sample(std::uint64_t value, std::string_view labels = {}) {
        sample(std::to_string(value), labels);
    }
    /// The text so far; the writer is done.
    [[nodiscard]] std::string take() { return std::move(out_); }

private:
    std::string out_;
    std::string_view name_;  // of the family that samples belong to; a literal of the caller
};

/// The whole text, written anew for each scrape: that is a few KiB every few seconds.
/// @param status a copy, so that all numbers are of one moment but the request counts, which go on.
/// @param paused whether inference was told to stand still. `routes[i]` is the path that requests
/// of route `i` are labelled with.
[[nodiscard]] inline std::string metrics_text(const worker_status& status, bool paused,
                                              const request_counters& requests,
                                              std::span<const std::string_view> routes) {
    // Names are an interface: dashboards break when one changes.
    metrics_writer out;
    out.family("weightwire_weight_version", "gauge", "Last whole version of the weights.");
    out.sample(status.version);
    out.family("weightwire_dirty", "gauge", "1 while the live weights are, or may be, a mix.");
    out.sample(std::uint64_t{status.dirty ? 1U : 0U});
    // A gauge: it begins at a random number, and growth is all that it tells.
    out.family("weightwire_epoch", "gauge", "Grows by one an init, from a random start.");
    out.sample(status.epoch);
    out.family("weightwire_paused", "gauge", "1 between pause and resume.");
    out.sample(std::uint64_t{paused ? 1U : 0U});
    // Counters begin at 0 with the process, which Prometheus expects and sees by their fall.
    out.family("weightwire_sessions_total", "counter", "Ended sessions, by how they ended.");
    out.sample(status.committed, R"({outcome="committed"})");
    out.sample(status.failed, R"({outcome="failed"})");
    out.sample(status.rolled_back, R"({outcome="rolled_back"})");
    out.family("weightwire_received_bytes_total", "counter", "Bytes placed, over all ranks.");
    out.sample(status.bytes);
    // The last one, not a histogram: rounds are minutes apart, and a scrape sees each.
    out.family("weightwire_last_update_seconds", "gauge", "Data move of the last update call.");
    out.sample(std::to_string(std::chrono::duration<double>(status.last_update).count()));
    out.family("weightwire_http_requests_total", "counter", "Requests, by route and status.");
    requests.each([&](std::size_t route, int code, std::uint64_t count) {
        out.sample(count, "{route=\"" + std::string{routes[route]} + "\",status=\"" +
                              (code == 0 ? std::string{"other"} : std::to_string(code)) + "\"}");
    });
    return out.take();
}

}  // namespace weightwire::detail
