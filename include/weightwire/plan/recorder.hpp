#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weightwire/core/dtype.hpp>
#include <weightwire/core/error.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/plan/recording_tensor.hpp>
#include <weightwire/plan/regions.hpp>

/// @file
/// Runs a worker's loader once, without values, and keeps what it copies:
///
///     const auto made = record(checkpoint, worker, [&](recorder& r) {
///         const auto destination = r.destination("qkv");
///         r.source("q").chunk(2)[rank].copy_to(destination.narrow(0, 0, 4));
///         r.source("k").narrow(0, rank * 2, 2).copy_to(destination.narrow(0, 4, 2));
///         r.source("v").narrow(0, rank * 2, 2).copy_to(destination.narrow(0, -2, 2));
///     });

namespace weightwire::plan {

/// What a loader copies: no element of a destination twice, and each that it leaves out on purpose.
struct recording {
    std::vector<region> regions{};    ///< in the order of the copies, in normal form
    std::vector<region> untouched{};  ///< elements that stay as they are; these have no source
    friend bool operator==(const recording&, const recording&) = default;
};

/// Hands out the tensors that a loader works on, and keeps what they are copied to. Everything that
/// it hands out refers to it.
class recorder {
public:
    /// @param checkpoint what the trainer has. @param worker what the worker holds. Both live as
    /// long as this object.
    recorder(const manifest& checkpoint, const manifest& worker)
        : sources_{&checkpoint}, destinations_{&worker} {}
    recorder(const manifest&&, const manifest&) = delete;
    recorder(const manifest&, const manifest&&) = delete;
    recorder(const manifest&&, const manifest&&) = delete;
    recorder(const recorder&) = delete;
    recorder& operator=(const recorder&) = delete;
    ~recorder() = default;

    [[nodiscard]] const manifest& sources() const noexcept { return *sources_; }
    [[nodiscard]] const manifest& destinations() const noexcept { return *destinations_; }
    [[nodiscard]] bool has_source(std::string_view name) const noexcept {
        return sources_->find(name) != manifest::npos;
    }
    [[nodiscard]] bool has_destination(std::string_view name) const noexcept {
        return destinations_->find(name) != manifest::npos;
    }
    /// A parameter of the checkpoint.
    /// @throws coverage_error there is none of this name.
    /// @throws unsupported_error it has too many elements, or elements of no whole bytes.
    [[nodiscard]] recording_tensor source(std::string_view name) {
        return tensor(*sources_, name, false);
    }
    /// A parameter of the worker.
    /// @throws coverage_error, unsupported_error as `source`.
    [[nodiscard]] recording_tensor destination(std::string_view name) {
        return tensor(*destinations_, name, true);
    }
    /// The copies so far, in their order and in normal form.
    [[nodiscard]] std::span<const region> recorded() const& noexcept { return regions_; }
    std::span<const region> recorded() const&& = delete;
    /// What was recorded; afterwards nothing is.
    /// @throws coverage_error an element of a destination is written twice, or is neither written
    /// nor left untouched on purpose; names the destination, the copies and the element.
    [[nodiscard]] recording finish();

private:
    friend class recording_tensor;

    [[nodiscard]] recording_tensor tensor(const manifest& parameters, std::string_view name,
                                          bool is_destination);
    void add(const recording_tensor* source, const recording_tensor& destination);
    void require_whole(std::size_t destination, std::span<const region> all,
                       const std::vector<std::size_t>& places) const;
    [[nodiscard]] std::string origin_of(const region& value) const {
        return value.source == region::no_source ? "the elements declared untouched"
                                                 : "`" + (*sources_)[value.source].name + "`";
    }

    const manifest* sources_;
    const manifest* destinations_;
    std::vector<region> regions_;
    std::vector<region> untouched_;
};

/// Runs `load(recorder&)` once and returns what it copies.
/// @throws what the loader throws, and what `recorder::finish` does.
template <std::invocable<recorder&> Loader>
[[nodiscard]] recording record(const manifest& checkpoint, const manifest& worker, Loader&& load) {
    recorder made{checkpoint, worker};
    std::forward<Loader>(load)(made);
    return made.finish();
}

inline recording_tensor recorder::tensor(const manifest& parameters, std::string_view name,
                                         bool is_destination) {
    const auto position = parameters.find(name);
    if (position == manifest::npos) {
        throw coverage_error{
            std::string{is_destination ? "the worker holds" : "the checkpoint has"} +
                " no parameter of this name, which the loader asks for",
            {.phase = phase::plan, .tensor = std::string{name}}};
    }
    const auto& parameter = parameters[position];
    const auto& extents = parameter.shape;
    if (item_bits(parameter.dtype) % 8 != 0 ||
        !detail::extents_fit({extents.begin(), extents.size()})) {
        throw unsupported_error{
            to_string(extents) + " in " + std::string{to_string(parameter.dtype)} +
                " cannot be recorded: elements are whole bytes, and fewer than 2^63",
            {.phase = phase::plan, .tensor = parameter.name}};
    }
    return {*this, parameter, position, is_destination};
}

/// Keeps a copy, or without a source what is left untouched. Shapes are equal, and each dimension
/// of the destination has one stride at most.
inline void recorder::add(const recording_tensor* source, const recording_tensor& destination) {
    const auto& to = destination.layout_;
    if (to.numel() == 0) {
        return;
    }
    region made{.source = source != nullptr ? source->position_ : region::no_source,
                .destination = destination.position_,
                .source_offset = source != nullptr ? source->layout_.offset() : 0,
                .destination_offset = to.offset()};
    for (std::size_t d = 0; d < to.rank(); ++d) {
        if (to.extent(d) == 1) {
            continue;
        }
        const auto stride = to.factors(d)[0].stride;
        if (source == nullptr) {
            made.dimensions.push_back({to.extent(d), 0, stride});
            continue;
        }
        auto below = to.extent(d);
        for (const auto& factor : source->layout_.factors(d)) {
            below /= factor.extent;
            made.dimensions.push_back({factor.extent, factor.stride, stride * below});
        }
    }
    normalize(made);
    (source != nullptr ? regions_ : untouched_).push_back(std::move(made));
}

inline void recorder::require_whole(std::size_t destination, std::span<const region> all,
                                    const std::vector<std::size_t>& places) const {
    const auto& parameter = (*destinations_)[destination];
    if (places.size() > 1) {
        if (const auto twice = find_overlap(all, places); twice != no_pair) {
            throw coverage_error{"the loader copies to some elements twice: from " +
                                     origin_of(all[twice.first]) + ", then from " +
                                     origin_of(all[twice.second]) + "; copy to each element once",
                                 {.phase = phase::plan, .tensor = parameter.name}};
        }
    }
    std::uint64_t written = 0;
    std::uint64_t runs = 0;
    for (const auto place : places) {
        written += all[place].elements();
        runs += all[place].elements() / run_elements(all[place]);
    }
    const auto numel = parameter.shape.checked_numel().value_or(0);
    if (written != numel) {
        constexpr std::uint64_t most_runs = std::uint64_t{1} << 22U;
        throw coverage_error{
            "the loader copies to " + std::to_string(written) + " of " + std::to_string(numel) +
                " elements" +
                (runs > most_runs
                     ? std::string{}
                     : ", element " + std::to_string(first_unwritten(all, places, numel)) +
                           " is the first left out") +
                "; call leave_untouched() on those that no copy is meant to write",
            {.phase = phase::plan, .tensor = parameter.name}};
    }
}

inline recording recorder::finish() {
    recording made{std::move(regions_), std::move(untouched_)};
    regions_.clear();
    untouched_.clear();
    // Both lists as one, and for each destination its places in it.
    auto all = made.regions;
    all.insert(all.end(), made.untouched.begin(), made.untouched.end());
    std::vector<std::size_t> order(all.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return all[i].destination; });
    std::vector<std::size_t> places;
    auto next = order.begin();
    for (std::size_t destination = 0; destination < destinations_->size(); ++destination) {
        places.clear();
        for (; next != order.end() && all[*next].destination == destination; ++next) {
            places.push_back(*next);
        }
        require_whole(destination, all, places);
    }
    return made;
}

inline void recording_tensor::copy_to(const recording_tensor& destination) const {
    const auto operation = [&] { return "copy_to(`" + destination.name() + "`)"; };
    if (is_destination_ || !destination.is_destination_ || recorder_ != destination.recorder_) {
        refuse(operation(),
               "a copy goes from a parameter of the checkpoint to one of the worker, "
               "in one recording; this one does not");
    }
    if (dtype() != destination.dtype()) {
        refuse<unsupported_error>(operation(),
                                  "a copy converts nothing, and this one would from " +
                                      std::string{to_string(dtype())} + " to " +
                                      std::string{to_string(destination.dtype())} +
                                      "; keep one dtype on both sides, or let the trainer convert");
    }
    if (!std::ranges::equal(layout_.extents(), destination.layout_.extents())) {
        refuse(operation(),
               "shapes differ: the destination is " + to_string(destination.shape()) +
                   (destination.chain_.empty() ? "" : " made by " + destination.chain_) +
                   ", and a copy broadcasts nothing");
    }
    destination.require_writable(operation());
    recorder_->add(this, destination);
}

inline void recording_tensor::leave_untouched() const {
    if (!is_destination_) {
        refuse("leave_untouched()", "only parameters of the worker are written");
    }
    require_writable("leave_untouched()");
    recorder_->add(nullptr, *this);
}

inline void recording_tensor::require_writable(std::string operation) const {
    if (layout_.copied()) {
        refuse(std::move(operation),
               "contiguous, reshape or flatten made a copy of the worker's parameter, which would "
               "be written in its place; use view");
    }
    if (layout_.repeats()) {
        refuse(std::move(operation),
               "the worker's parameter is expanded, so that elements would "
               "be written several times");
    }
}

}  // namespace weightwire::plan
