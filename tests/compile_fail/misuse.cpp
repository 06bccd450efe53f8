// SPDX-License-Identifier: Apache-2.0
// Wrong uses that must not compile.

#include <chrono>
#include <cstddef>
#include <span>

#include <weightwire/concepts/transport.hpp>
#include <weightwire/core/deadline.hpp>
#include <weightwire/core/manifest.hpp>
#include <weightwire/core/tensor.hpp>

using namespace weightwire;

manifest make_manifest() { return {}; }

// A view into a list that is gone.
void dangling() {
    const auto kept = make_manifest();
    std::span<const param_meta> names = kept.parameters();
#ifdef EXPECT_FAIL_1  // expect: deleted
    names = make_manifest().parameters();
#endif
    static_cast<void>(names);
}

// Writing through a view that only reads.
void write_zeros(mutable_tensor_view) {}
void writes(std::byte* memory) {
    const mutable_tensor_view writable{memory, dtype::u8, {4}};
    const tensor_view readable = writable;
    write_zeros(writable);
#ifdef EXPECT_FAIL_2  // expect: basic_tensor_view<std::byte>
    write_zeros(readable);
#endif
    static_cast<void>(readable);
}

// A tag that nobody specialised backend_traits for.
struct unknown_backend {};
template <Transport Tag>
void use() {}
template <class Tag>
constexpr bool usable = Transport<Tag>;
static_assert(!usable<unknown_backend>);
#ifdef EXPECT_FAIL_3  // expect: HasWireName
void uses() { use<unknown_backend>(); }
#endif
#ifdef EXPECT_FAIL_4  // expect: Transport: add static constexpr std::string_view wire_name to backend_traits
static_assert(explain_transport<unknown_backend>());
#endif

// A number of seconds is no point in time.
void waits(deadline) {}
void waiting() {
    waits(deadline::after(std::chrono::seconds{1}));
#ifdef EXPECT_FAIL_5  // expect: deadline
    waits(std::chrono::seconds{1});
#endif
}
