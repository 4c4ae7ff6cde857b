// What repacking costs or brings: one product with the weights as they lie in the file, and with the CPU's repacked ones.
//
// Interleaved rounds, the fastest of each. Fails where repacking makes a product of 512 columns (a prompt) slower.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

static constexpr int64_t n_rows   = 4096;
static constexpr int64_t n_inner  = 4096;
static constexpr int     n_rounds = 7;

static ggml_backend_buffer_type_t repack_buft(ggml_backend_dev_t dev) {
    auto * reg = ggml_backend_dev_backend_reg(dev);
    auto get_extra_bufts = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    for (auto * buft = get_extra_bufts ? get_extra_bufts(dev) : nullptr; buft && *buft; ++buft) {
        if (strcmp(ggml_backend_buft_name(*buft), "CPU_REPACK") == 0) {
            return *buft;
        }
    }
    return nullptr;
}

// one product whose weights lie in a buffer type of their own
struct product {
    ggml_context_ptr        ctx_w;
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf_w;
    ggml_backend_buffer_ptr buf;
    ggml_cgraph *           gf = nullptr;
    bool                    packed = false;

    product(ggml_backend_t backend, ggml_backend_buffer_type_t buft, ggml_type type, int64_t n_cols) {
        const ggml_init_params params = { 1 << 20, nullptr, true };
        ctx_w.reset(ggml_init(params));
        ctx.reset(ggml_init(params));

        ggml_tensor * w = ggml_new_tensor_2d(ctx_w.get(), type, n_inner, n_rows);
        ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_inner, n_cols);
        gf = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(gf, ggml_mul_mat(ctx.get(), w, x));

        buf_w.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_w.get(), buft));
        packed = w->extra != nullptr;
        if (buft != ggml_backend_get_default_buffer_type(backend) && !packed) {
            w->buffer = nullptr; // no repacked kernel for this type: as in a model, the default buffer
            w->data   = nullptr;
            buf_w.reset(ggml_backend_alloc_ctx_tensors(ctx_w.get(), backend));
        }
        buf.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));

        std::vector<float> values(n_inner*std::max(n_rows, n_cols));
        for (size_t i = 0; i < values.size(); ++i) {
            values[i] = (float) ((i*2654435761u >> 16) % 1000)/1000.0f - 0.5f;
        }
        std::vector<uint8_t> data(ggml_nbytes(w));
        ggml_quantize_chunk(type, values.data(), data.data(), 0, n_rows, n_inner, nullptr);
        ggml_backend_tensor_set(w, data.data(), 0, data.size());
        ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
    }

    double seconds(ggml_backend_t backend) const {
        const int64_t t0 = ggml_time_us();
        ggml_backend_graph_compute(backend, gf);
        return 1e-6*(ggml_time_us() - t0);
    }
};

int main(void) {
    ggml_time_init();
    ggml_backend_ptr backend{ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)};
    ggml_backend_dev_t dev = ggml_backend_get_device(backend.get());
    ggml_backend_buffer_type_t plain  = ggml_backend_get_default_buffer_type(backend.get());
    ggml_backend_buffer_type_t repack = repack_buft(dev);
    if (!repack) {
        printf("  no repacked weights on this CPU, \033[1;33mSKIP\033[m\n");
        return 0;
    }

    bool ok = true;
    for (ggml_type type : { GGML_TYPE_Q4_K, GGML_TYPE_Q2_K }) {
        for (int64_t n_cols : { 512, 1 }) {
            const product as_is (backend.get(), plain,  type, n_cols);
            const product packed(backend.get(), repack, type, n_cols);
            double best[2] = { 1e9, 1e9 };
            for (int i = 0; i < n_rounds; ++i) {
                best[0] = std::min(best[0], as_is .seconds(backend.get()));
                best[1] = std::min(best[1], packed.seconds(backend.get()));
            }
            const double gflop = 2e-9*n_rows*n_inner*n_cols;
            const bool   slow  = packed.packed && n_cols > 1 && best[1] > 1.1*best[0];
            printf("  %-5s %4d column%s  as in the file %7.1f GFLOP/s  %s %7.1f GFLOP/s  %s\n", ggml_type_name(type), (int) n_cols,
                    n_cols == 1 ? " " : "s", gflop/best[0], packed.packed ? "repacked    " : "not repacked", gflop/best[1],
                    slow ? "\033[1;31mFAIL\033[m" : "\033[1;32mPASS\033[m");
            ok &= !slow;
        }
    }

    return ok ? 0 : 1;
}
