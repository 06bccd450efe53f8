// SPDX-License-Identifier: Apache-2.0
// Wrong uses of `trainer_init` that must not compile, and say what to write instead.

#include <vector>

#include <weightwire/backends/ipc/backend.hpp>
#include <weightwire/engine/local_sync_client.hpp>
#include <weightwire/testing/recording_service.hpp>
#include <weightwire/trainer.hpp>

using namespace weightwire;

// Tensors are no source by themselves.
void sends(std::vector<named_tensor>& tensors, testing::recording_service& service) {
    local_sync_client client{service};
    auto engine = trainer_init(ipc::trainer_init_info{}, client, span_source{tensors});
#ifdef EXPECT_FAIL_1  // expect: weightwire::span_source{tensors}
    trainer_init(ipc::trainer_init_info{}, client, tensors);
#endif
    engine.close(deadline::after(std::chrono::seconds{1}));
}

// The threads of a local client point to it.
void moves(std::vector<named_tensor>& tensors, testing::recording_service& service) {
    static_cast<void>(tensors);
    static_cast<void>(service);
#ifdef EXPECT_FAIL_2  // expect: deleted
    auto engine =
        trainer_init(ipc::trainer_init_info{}, local_sync_client{service}, span_source{tensors});
#endif
}
