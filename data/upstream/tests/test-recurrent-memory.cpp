// What a server asks of a recurrent memory, whatever the architecture; random weights will do (`test-llama-archs -o`).
// Each sequence is held against the same tokens in a context of its own (NMSE of the last logits).
//
//   slots   a context of 1 to 17 sequences starts, each reads a prompt, and all take steps together
//   share   three prompts of different lengths in one batch, then steps together
//   draft   a context with n_rs_seq = 8: a token and a draft of 1 to 8 in one batch, the draft is removed (or that is refused)
//   apart   the same where every token of the draft came in a batch of its own
//   beside  three slots, read in another order, with a draft each in one batch, the first one's a token longer; all are removed
//   copied  a draft is removed, and two copies of the sequence go on beside it

#include "llama.h"
#include "llama-cpp.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

static constexpr int    n_prompt = 24;
static constexpr int    n_steps  = 4;
static constexpr int    n_draft  = 8;
static constexpr int    n_slots  = 17;
static constexpr double nmse_eps = 1e-6;

using logits_t = std::vector<float>;
using call_t   = std::map<llama_seq_id, std::vector<llama_token>>;

static double nmse(const logits_t & a, const logits_t & b) {
    double mse_ab = 0.0;
    double mse_a0 = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        if (!std::isfinite(a[i]) || !std::isfinite(b[i])) {
            return std::numeric_limits<double>::infinity();
        }
        const double diff = (double) a[i] - b[i];
        mse_ab += diff*diff;
        mse_a0 += (double) a[i]*a[i];
    }
    return mse_a0 == 0.0 ? mse_ab : mse_ab/mse_a0;
}

// A context, the tokens that each of its sequences holds, and the last logits of each.
struct runner {
    llama_model *                   model;
    llama_context_ptr               ctx;
    call_t                          held;
    std::map<llama_seq_id, logits_t> last;
    std::mt19937                    rng{1};

    runner(llama_model * model, int n_seq_max = 1, int n_rs_seq = 0) : model(model) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx     = 128*n_seq_max;
        params.n_batch   = 512;
        params.n_ubatch  = 512;
        params.n_seq_max = n_seq_max;
        params.n_rs_seq  = n_rs_seq;
        ctx.reset(llama_init_from_model(model, params));
    }

    std::vector<llama_token> random(int n) {
        std::vector<llama_token> res(n);
        for (auto & token : res) {
            token = rng() % llama_vocab_n_tokens(llama_model_get_vocab(model));
        }
        return res;
    }

    void decode(const call_t & call) {
        const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        llama_batch batch = llama_batch_init(512, 0, 1);
        std::map<llama_seq_id, int> rows;
        for (const auto & [seq, tokens] : call) {
            for (const llama_token token : tokens) {
                rows[seq] = batch.n_tokens;
                batch.token   [batch.n_tokens]    = token;
                batch.pos     [batch.n_tokens]    = held[seq].size();
                batch.n_seq_id[batch.n_tokens]    = 1;
                batch.seq_id  [batch.n_tokens][0] = seq;
                batch.logits  [batch.n_tokens]    = 1;
                batch.n_tokens++;
                held[seq].push_back(token);
            }
        }
        const int32_t status = llama_decode(ctx.get(), batch);
        for (const auto & [seq, row] : rows) {
            const float * logits = status == 0 ? llama_get_logits_ith(ctx.get(), row) : nullptr;
            last[seq] = logits ? logits_t(logits, logits + n_vocab) : logits_t(n_vocab, NAN);
        }
        llama_batch_free(batch);
    }

    void steps(int n_seq, int n = n_steps) {
        for (int i = 0; i < n; ++i) {
            call_t call;
            for (llama_seq_id seq = 0; seq < n_seq; ++seq) {
                call[seq] = random(1);
            }
            decode(call);
        }
    }

    // Largest NMSE of any sequence against its tokens alone: `first` of them in one batch, then one by one.
    double worst(const std::vector<int> & first) {
        double res = 0.0;
        for (const auto & [seq, tokens] : held) {
            runner fresh(model);
            fresh.decode({{ 0, { tokens.begin(), tokens.begin() + first[seq] } }});
            for (size_t i = first[seq]; i < tokens.size(); ++i) {
                fresh.decode({{ 0, { tokens[i] } }});
            }
            res = std::max(res, nmse(fresh.last.at(0), last.at(seq)));
        }
        return res;
    }
};

static bool report(const char * name, double value, const char * said = "") {
    const bool ok = value <= nmse_eps;
    printf("  %-6s  NMSE %8.1e  %s%s\n", name, value, ok ? "\033[1;32mPASS\033[m" : "\033[1;31mFAIL\033[m", said);
    fflush(stdout);
    return ok;
}

static bool test_draft(llama_model * model, bool together) {
    double worst = 0.0;
    int refused = 0;
    for (int n = 1; n <= n_draft; ++n) {
        runner run(model, 1, n_draft);
        run.decode({{ 0, run.random(n_prompt) }});
        std::vector<llama_token> tokens = run.random(n + 1);
        if (together) {
            run.decode({{ 0, tokens }});
        } else {
            for (const llama_token token : tokens) {
                run.decode({{ 0, { token } }});
            }
        }
        run.held[0].resize(n_prompt + 1);
        if (!llama_memory_seq_rm(llama_get_memory(run.ctx.get()), 0, n_prompt + 1, -1)) {
            refused++;
            continue;
        }
        run.decode({{ 0, run.random(1) }});
        worst = std::max(worst, run.worst({ n_prompt }));
    }
    return report(together ? "draft" : "apart", worst, refused ? "  (refused)" : "");
}

// Removes everything behind the tokens that are held; false where the memory refuses.
static bool remove_tail(runner & run, llama_seq_id seq) {
    return llama_memory_seq_rm(llama_get_memory(run.ctx.get()), seq, run.held[seq].size(), -1);
}

static bool test_beside(llama_model * model) {
    double worst = 0.0;
    int refused = 0;
    for (int n = 1; n < n_draft; ++n) {
        const std::vector<int> lengths = { n_prompt, 17, 9 };
        runner run(model, 3, n_draft);
        for (llama_seq_id seq : { 1, 0, 2 }) {
            run.decode({{ seq, run.random(lengths[seq]) }});
        }
        call_t call;
        for (llama_seq_id seq = 0; seq < 3; ++seq) {
            call[seq] = run.random(1 + n + (seq == 0));
        }
        run.decode(call);
        bool all = true;
        for (llama_seq_id seq = 0; seq < 3; ++seq) {
            run.held[seq].resize(lengths[seq] + 1);
            all = remove_tail(run, seq) && all;
        }
        if (!all) {
            refused++;
            continue;
        }
        run.steps(3, 1); // a short convolution soon forgets a wrong state
        worst = std::max(worst, run.worst(lengths));
    }
    return report("beside", worst, refused ? "  (refused)" : "");
}

static bool test_copied(llama_model * model) {
    double worst = 0.0;
    int refused = 0;
    for (int n = 1; n <= n_draft; ++n) {
        runner run(model, 3, n_draft);
        run.decode({{ 0, run.random(n_prompt) }});
        run.decode({{ 0, run.random(n + 1) }});
        run.held[0].resize(n_prompt + 1);
        if (!remove_tail(run, 0)) {
            refused++;
            continue;
        }
        for (llama_seq_id seq = 1; seq < 3; ++seq) {
            llama_memory_seq_cp(llama_get_memory(run.ctx.get()), 0, seq, -1, -1);
            run.held[seq] = run.held[0];
        }
        run.steps(3, 1); // a short convolution soon forgets a wrong state
        worst = std::max(worst, run.worst(std::vector<int>(3, n_prompt)));
    }
    return report("copied", worst, refused ? "  (refused)" : "");
}

static bool test_model(const std::string & path) {
    printf("%s\n", std::filesystem::path(path).filename().string().c_str());

    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts = false; // the graph is tested, not the kernels of one processor
    llama_model_ptr model{llama_model_load_from_file(path.c_str(), params)};
    if (!model) {
        printf("  cannot be loaded\n");
        return false;
    }

    bool ok = true;
    ok &= test_draft(model.get(), true);
    ok &= test_draft(model.get(), false);
    ok &= test_beside(model.get());
    ok &= test_copied(model.get());

    double worst = 0.0;
    for (int n = 1; n <= n_slots; ++n) {
        runner run(model.get(), n);
        for (llama_seq_id seq = 0; seq < n; ++seq) {
            run.decode({{ seq, run.random(n_prompt) }});
        }
        run.steps(n);
        worst = std::max(worst, run.worst(std::vector<int>(n, n_prompt)));
    }
    ok &= report("slots", worst);

    {
        const std::vector<int> lengths = { n_prompt, 17, 9 };
        runner run(model.get(), 3);
        call_t call;
        for (llama_seq_id seq = 0; seq < 3; ++seq) {
            call[seq] = run.random(lengths[seq]);
        }
        run.decode(call);
        run.steps(3);
        ok &= report("share", run.worst(lengths));
    }

    return ok;
}

int main(int argc, char ** argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s model.gguf|folder [...]\n", argv[0]);
        return 1;
    }

    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();

    bool ok = true;
    for (int i = 1; i < argc; ++i) {
        if (std::filesystem::is_directory(argv[i])) {
            for (const auto & entry : std::filesystem::directory_iterator(argv[i])) {
                if (entry.path().extension() == ".gguf") {
                    ok &= test_model(entry.path().string());
                }
            }
        } else {
            ok &= test_model(argv[i]);
        }
    }

    return ok ? 0 : 1;
}
