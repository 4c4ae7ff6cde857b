// A decode step of several sequences multiplies every recurrent projection once, by a matrix, and not once a sequence.
//
// With activations {width, 1, n_seqs} ggml_mul_mat is n_seqs matrix-vector products that each read the weights anew;
// {width, n_seqs} is one product. Watched through cb_eval, so no time is measured.

#include "llama.h"
#include "llama-cpp.h"
#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>

static constexpr int n_seqs = 4;

// name of the projection -> products it is split into
static bool watch(struct ggml_tensor * t, bool ask, void * user_data) {
    if (ask && t->op == GGML_OP_MUL_MAT && strstr(t->src[0]->name, ".ssm_")) {
        auto & split = *(std::map<std::string, int64_t> *) user_data;
        split[strchr(t->src[0]->name, 's')] = t->src[1]->ne[2]*t->src[1]->ne[3];
    }
    return false;
}

static bool test_model(const char * path) {
    printf("%s\n", std::filesystem::path(path).filename().string().c_str());

    llama_model_params mparams = llama_model_default_params();
    mparams.use_extra_bufts = false; // the graph is tested, not the kernels of one processor
    llama_model_ptr model{llama_model_load_from_file(path, mparams)};
    if (!model) {
        printf("  cannot be loaded\n");
        return false;
    }

    std::map<std::string, int64_t> split;

    llama_context_params cparams = llama_context_default_params();
    cparams.n_ctx             = 256;
    cparams.n_seq_max         = n_seqs;
    cparams.cb_eval           = watch;
    cparams.cb_eval_user_data = &split;

    llama_context_ptr ctx{llama_init_from_model(model.get(), cparams)};
    if (!ctx) {
        return false;
    }

    llama_batch batch = llama_batch_init(n_seqs, 0, 1);
    for (llama_seq_id seq = 0; seq < n_seqs; ++seq) {
        batch.token   [seq]    = 5 + seq;
        batch.pos     [seq]    = 0;
        batch.n_seq_id[seq]    = 1;
        batch.seq_id  [seq][0] = seq;
        batch.logits  [seq]    = 1;
    }
    batch.n_tokens = n_seqs;

    bool ok = llama_decode(ctx.get(), batch) == 0;
    llama_batch_free(batch);

    if (split.empty()) {
        printf("  no recurrent projection, \033[1;33mSKIP\033[m\n");
    }
    for (const auto & [name, products] : split) {
        printf("  %-16s %d product%s  %s\n", name.c_str(), (int) products, products == 1 ? " " : "s",
                products == 1 ? "\033[1;32mPASS\033[m" : "\033[1;31mFAIL\033[m");
        ok &= products == 1;
    }

    return ok;
}

int main(int argc, char ** argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s model.gguf [...]\n", argv[0]);
        return 1;
    }

    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();

    bool ok = true;
    for (int i = 1; i < argc; ++i) {
        ok &= test_model(argv[i]);
    }

    return ok ? 0 : 1;
}
