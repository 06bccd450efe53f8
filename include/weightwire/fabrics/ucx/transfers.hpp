#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <ucp/api/ucp.h>

#include <weightwire/core/check_time.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/fabrics/pull_fabric.hpp>
#include <weightwire/fabrics/ucx/links.hpp>
#include <weightwire/fabrics/ucx/memory.hpp>
#include <weightwire/fabrics/ucx/pieces.hpp>
#include <weightwire/fabrics/ucx/staging.hpp>
#include <weightwire/fabrics/ucx/texts.hpp>
#include <weightwire/fabrics/ucx/worker.hpp>

/// @file
/// The reads of one reader: transfers in flight, places to land, and what is laid out from there.

namespace weightwire::ucx {

/// Stays where it is. One thread at a time.
template <class Staging>
class transfers {
public:
    using run = remote_run<memory>;
    /// Transfers in flight over one link, of all reads together. One: where UCX emulates reads, as
    /// over tcp, an owner that finds a second request of a reader that has died or given up ends
    /// its process (seen in 1.13: `ucp_get_req_handler`, "unexpected error: Endpoint timeout"). One
    /// answer fits into a segment and is never queued.
    static constexpr std::size_t window = 1;
    /// Places that all reads share.
    static constexpr std::size_t places = 32;
    /// Pieces of one read that are moving, have landed or are being laid out. Where copies end
    /// later than they are called for, the next transfer goes on beside them.
    static constexpr std::size_t depth = Staging::copies_at_once ? window : window + 3;

    enum class stage : std::uint8_t { idle, moving, landed, laying };
    struct flight {
        stage at = stage::idle;
        void* request = nullptr;
        std::size_t piece = 0;
        std::size_t place = 0;
    };
    /// One read.
    struct state {
        transfers* by = nullptr;
        std::shared_ptr<links> in{};  // before the registrations, which end first
        std::vector<run> runs{};
        std::vector<piece<memory>> pieces{};
        std::vector<registration> registered{};    ///< destinations of direct pieces
        std::vector<std::size_t> registered_by{};  ///< of each direct piece, which
        std::uint64_t shift = 0;
        std::size_t next = 0;
        std::size_t finished = 0;
        std::array<flight, depth> flights{};
        layout_of<Staging> layout{};  ///< how the device lays pieces out
        ucs_status_t failed = UCS_OK;
        const link* lost = nullptr;
        bool active = false;
    };

    explicit transfers(int device) : staging_{device} {
        [[maybe_unused]] const auto here = scope_of(staging_);
        links_ = std::make_shared<links>();
    }
    transfers(const transfers&) = delete;
    transfers& operator=(const transfers&) = delete;
    ~transfers() {
        while (!active_.empty()) {
            cancel(*active_.back());
        }
    }

    [[nodiscard]] const std::shared_ptr<links>& shared_links() const noexcept { return links_; }
    [[nodiscard]] Staging& used_staging() noexcept { return staging_; }
    [[nodiscard]] const Staging& used_staging() const noexcept { return staging_; }

    /// Brings a few bytes now; they are there until the next call.
    /// @throws peer_error, timeout_error, cancelled_error
    [[nodiscard]] std::span<const std::byte> bring(link& from, const remote_key& key,
                                                   std::uint64_t address, std::uint64_t bytes,
                                                   deadline until, const std::stop_token& stop) {
        make_places();
        auto* const to = place_at(places);
        bring_to({to, landing_registered_, UCS_MEMORY_TYPE_HOST}, from, key, address, bytes, until,
                 stop);
        return {to, static_cast<std::size_t>(bytes)};
    }
    /// Brings a few bytes to registered memory now. Throws the same.
    void bring_to(const landing_place& to, link& from, const remote_key& key, std::uint64_t address,
                  std::uint64_t bytes, deadline until, const std::stop_token& stop);
    [[nodiscard]] std::unique_ptr<state> prepare(std::span<const run> runs);
    void start(state& which, std::uint64_t shift);
    [[nodiscard]] bool done(state& which);
    void wait(state& which, deadline until, const std::stop_token& stop);
    void cancel(state& which) noexcept;

private:
    /// Bytes that one look lays out: between two looks at the clock.
    static constexpr std::uint64_t laid_at_once = std::uint64_t{4} << 20U;

    [[nodiscard]] std::byte* place_at(std::size_t place) const noexcept {
        return landing_.data() + place * piece_bytes;
    }
    void make_places();
    bool drive();
    bool advance(state& which, std::uint64_t& budget);
    bool begin_next(state& which, flight& with);
    void settle(state& which, flight& with, ucs_status_t status) noexcept;
    void end_flight(flight& which) noexcept;
    void give_up() noexcept;
    [[nodiscard]] static bool is(stage at, const state& which) noexcept {
        return std::ranges::any_of(which.flights,
                                   [at](const flight& each) { return each.at == at; });
    }

    Staging staging_;
    std::shared_ptr<links> links_;
    typename Staging::buffer landing_{};  ///< `places`, and one for `bring`
    registration landing_registered_{};
    std::vector<typename Staging::mark> marks_;  ///< of each place
    std::vector<std::size_t> free_places_;
    std::vector<state*> active_;
    std::size_t prepared_ = 0;
};

template <class Staging>
void transfers<Staging>::make_places() {
    if (landing_.data() != nullptr) {
        return;
    }
    [[maybe_unused]] const auto here = scope_of(staging_);
    auto made = staging_.allocate((places + 1) * piece_bytes);
    auto registered = registration::create(links_->used_context(), made.data(), made.size());
    for (std::size_t i = 0; i < places; ++i) {
        marks_.push_back(staging_.make_mark());
        free_places_.push_back(i);
    }
    landing_ = std::move(made);
    landing_registered_ = std::move(registered);
}

template <class Staging>
void transfers<Staging>::bring_to(const landing_place& to, link& from, const remote_key& key,
                                  std::uint64_t address, std::uint64_t bytes, deadline until,
                                  const std::stop_token& stop) {
    [[maybe_unused]] const auto here = scope_of(staging_);
    void* const request = links_->get(from, key, address, to, bytes);
    auto status = UCS_PTR_IS_PTR(request) ? UCS_INPROGRESS : UCS_PTR_STATUS(request);
    try {
        while (status == UCS_INPROGRESS) {
            status = ucp_request_check_status(request);
            if (status == UCS_INPROGRESS) {
                links_->wait_a_while(until, stop, [&] {
                    return error_context{.phase = phase::init, .peer = from.peer};
                });
            }
        }
    } catch (...) {
        links_->close(from);
        const auto end = deadline::after(links::let_go);
        while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS && !end.expired()) {
            links_->progress();
        }
        if (status == UCS_INPROGRESS) {
            give_up();
        } else {
            ucp_request_free(request);
        }
        throw;
    }
    if (UCS_PTR_IS_PTR(request)) {
        ucp_request_free(request);
    }
    if (status != UCS_OK) {
        throw links::lost(from, status, phase::init);
    }
}

template <class Staging>
auto transfers<Staging>::prepare(std::span<const run> runs) -> std::unique_ptr<state> {
    make_places();
    [[maybe_unused]] const auto here = scope_of(staging_);
    auto made = std::make_unique<state>();
    made->by = this;
    made->in = links_;
    made->runs.assign(runs.begin(), runs.end());
    made->pieces = cut_pieces<memory>(runs, staging_.direct);
    made->registered_by.resize(made->pieces.size());
    for (std::size_t i = 0; i < made->pieces.size();) {
        auto* const begin = made->pieces[i].direct;
        if (begin == nullptr) {
            ++i;
            continue;
        }
        auto* end = begin;
        for (; i < made->pieces.size() && made->pieces[i].direct == end; ++i) {
            end += made->pieces[i].bytes;
            made->registered_by[i] = made->registered.size();
        }
        made->registered.push_back(registration::create(links_->used_context(), begin,
                                                        static_cast<std::uint64_t>(end - begin),
                                                        destination_type<Staging>));
    }
    if constexpr (HasLayouts<Staging>) {
        made->layout = staging_.template make_layout<memory>(made->pieces, made->runs, places,
                                                             landing_.data());
    }
    active_.reserve(++prepared_);
    return made;
}

template <class Staging>
void transfers<Staging>::start(state& which, std::uint64_t shift) {
    if (which.active) {
        throw usage_error{"a read that is under way is started again"};
    }
    which.shift = shift;
    which.next = 0;
    which.finished = 0;
    which.failed = UCS_OK;
    which.lost = nullptr;
    which.active = !which.pieces.empty();
    if (which.active) {
        [[maybe_unused]] const auto here = scope_of(staging_);
        active_.push_back(&which);
        auto budget = std::uint64_t{0};
        advance(which, budget);
        if (!which.active) {  // ended at once
            std::erase(active_, &which);
        }
    }
}

template <class Staging>
void transfers<Staging>::end_flight(flight& which) noexcept {
    which.at = stage::idle;
    which.request = nullptr;
}

/// A transfer has come to its end.
template <class Staging>
void transfers<Staging>::settle(state& which, flight& with, ucs_status_t status) noexcept {
    const auto& moved = which.pieces[with.piece];
    moved.from->of().moving = false;
    if (status == UCS_OK && moved.direct == nullptr) {
        with.at = stage::landed;
        return;
    }
    if (status != UCS_OK && which.failed == UCS_OK) {
        which.failed = status;
        which.lost = &moved.from->of();
    }
    if (moved.direct == nullptr) {
        free_places_.push_back(with.place);
    }
    which.finished += status == UCS_OK ? 1 : 0;
    end_flight(with);
}

/// Begins the next transfer; false where there is none, no place for it, or another is in flight.
template <class Staging>
bool transfers<Staging>::begin_next(state& which, flight& with) {
    if (which.failed != UCS_OK || which.next == which.pieces.size()) {
        return false;
    }
    const auto& wanted = which.pieces[which.next];
    if (wanted.from->of().moving || (wanted.direct == nullptr && free_places_.empty())) {
        return false;
    }
    if (wanted.direct == nullptr) {
        with.place = free_places_.back();
        free_places_.pop_back();
    }
    const auto to =
        wanted.direct == nullptr
            ? landing_place{place_at(with.place), landing_registered_, UCS_MEMORY_TYPE_HOST}
            : landing_place{wanted.direct, which.registered[which.registered_by[which.next]],
                            destination_type<Staging>};
    with.piece = which.next++;
    wanted.from->of().moving = true;
    void* const request =
        links_->get(wanted.from->of(), wanted.from->key(),
                    wanted.from->address() + which.shift + wanted.offset, to, wanted.bytes);
    if (UCS_PTR_IS_PTR(request)) {
        with.at = stage::moving;
        with.request = request;
    } else {
        settle(which, with, UCS_PTR_STATUS(request));
    }
    return true;
}

/// One step of a read; whether anything was done.
template <class Staging>
bool transfers<Staging>::advance(state& which, std::uint64_t& budget) {
    bool moved = false;
    for (auto& each : which.flights) {
        if (each.at == stage::moving) {
            const auto status = ucp_request_check_status(each.request);
            if (status == UCS_INPROGRESS) {
                continue;
            }
            ucp_request_free(each.request);
            settle(which, each, status);
            moved = true;
        }
        if (each.at == stage::landed && budget > 0) {
            const auto& landed = which.pieces[each.piece];
            if constexpr (HasLayouts<Staging>) {
                staging_.template lay<memory>(which.layout, each.piece, landed, which.runs,
                                              each.place, place_at(each.place));
            } else {
                lay_out<memory>(landed, which.runs, place_at(each.place),
                                [this](std::byte* to, std::uint64_t step, const std::byte* from,
                                       std::uint64_t bytes, std::uint64_t count) {
                                    staging_.copy(to, step, from, bytes, count);
                                });
            }
            staging_.record(marks_[each.place]);
            budget -= std::min(budget, landed.bytes);
            each.at = stage::laying;
            moved = true;
        }
        if (each.at == stage::laying && staging_.reached(marks_[each.place])) {
            free_places_.push_back(each.place);
            ++which.finished;
            end_flight(each);
            moved = true;
        }
        if (each.at == stage::idle) {
            moved = begin_next(which, each) || moved;
        }
    }
    if (which.finished == which.pieces.size()) {
        which.active = false;
    }
    return moved;
}

/// One step of all reads that are under way.
template <class Staging>
bool transfers<Staging>::drive() {
    [[maybe_unused]] const auto here = scope_of(staging_);
    bool moved = links_->progress();
    auto budget = laid_at_once;
    const auto drop_ended = [this] {
        std::erase_if(active_, [](const state* each) { return !each->active; });
    };
    try {
        for (auto* each : active_) {
            moved = advance(*each, budget) || moved;
        }
    } catch (...) {
        drop_ended();
        throw;
    }
    drop_ended();
    return moved;
}

template <class Staging>
bool transfers<Staging>::done(state& which) {
    if (which.active) {
        try {
            drive();
        } catch (...) {
            cancel(which);
            throw;
        }
    }
    if (which.failed != UCS_OK) {
        const auto status = which.failed;
        cancel(which);
        throw links::lost(*which.lost, status, phase::update);
    }
    return !which.active;
}

template <class Staging>
void transfers<Staging>::wait(state& which, deadline until, const std::stop_token& stop) {
    const auto where = [&] {
        const auto& from = which.pieces[std::min(which.finished, which.pieces.size() - 1)].from;
        return error_context{.phase = phase::update, .peer = from->of().peer};
    };
    [[maybe_unused]] const auto here = scope_of(staging_);
    try {
        while (which.active) {
            const bool moved = drive();
            if (which.failed != UCS_OK) {
                break;
            }
            if (!which.active) {
                break;
            }
            if (moved) {
                weightwire::detail::check_time(until, stop, where);
            } else if (!Staging::copies_at_once && is(stage::laying, which) &&
                       !is(stage::moving, which)) {
                // No event of UCX tells of these copies' end.
                weightwire::detail::check_time(until, stop, where);
                std::this_thread::sleep_for(std::chrono::microseconds{20});
            } else {
                links_->wait_a_while(until, stop, where);
            }
        }
    } catch (...) {
        cancel(which);
        throw;
    }
    static_cast<void>(done(which));
}

template <class Staging>
void transfers<Staging>::cancel(state& which) noexcept {
    [[maybe_unused]] const auto here = scope_of(staging_);
    for (const auto& each : which.flights) {
        if (each.at == stage::moving) {
            links_->close(const_cast<link&>(which.pieces[each.piece].from->of()));
        }
    }
    const auto until = deadline::after(links::let_go);
    while (is(stage::moving, which)) {
        if (until.expired()) {
            give_up();
            break;
        }
        links_->progress();
        for (auto& each : which.flights) {
            if (each.at != stage::moving) {
                continue;
            }
            const auto status = ucp_request_check_status(each.request);
            if (status != UCS_INPROGRESS) {
                ucp_request_free(each.request);
                settle(which, each, status);
            }
        }
    }
    if constexpr (HasLayouts<Staging>) {
        // Of a piece that was begun and then failed there is no mark.
        if (is(stage::landed, which) || is(stage::laying, which)) {
            staging_.come_to_rest();
        }
    }
    for (auto& each : which.flights) {
        if (each.at == stage::laying) {
            staging_.finish(marks_[each.place]);
        }
        if (each.at == stage::landed || each.at == stage::laying) {
            free_places_.push_back(each.place);
            end_flight(each);
        }
    }
    which.active = false;
    which.failed = UCS_OK;
    std::erase(active_, &which);
}

/// What does not come to rest ends with the worker: nothing writes after that.
template <class Staging>
void transfers<Staging>::give_up() noexcept {
    links_->give_up();
    for (auto* each : active_) {
        for (auto& with : each->flights) {
            if (with.at == stage::moving) {
                settle(*each, with, UCS_ERR_CANCELED);  // its request ended with the worker
            }
        }
    }
}

}  // namespace weightwire::ucx
