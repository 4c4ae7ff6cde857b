// A sequence whose last tokens are removed must go on as if it had never seen them, whoever its neighbours are.
//
// For recurrent and hybrid models, with a context that keeps the states of the last n_rs_seq tokens; random weights will
// do. Five tests, each against the same tokens in a context of their own that never drafted (NMSE of the last logits):
//
//   exact      a token and a draft of 8 in one batch, 1 to 8 of them removed, then one more token
//   rounds     twenty rounds of drafting and removing, of random lengths
//   once       a second removal before the next decode is refused
//   neighbours four sequences draft in one batch, each removes another number of tokens, all go on in one batch
//   bystander  sequences 1 and 2 draft, remove and go on; then sequences 0 and 3 do

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

static constexpr int    n_seqs   = 4;
static constexpr int    n_prompt = 48;
static constexpr int    n_draft  = 8;
static constexpr double nmse_eps = 1e-4; // as in test-recurrent-state-rollback

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

// A context and the tokens that each of its sequences holds.
struct runner {
    llama_model *     model;
    llama_context_ptr ctx;
    call_t            held;
    std::mt19937      rng{1};

    runner(llama_model * model) : model(model) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx     = 2048;
        params.n_batch   = 512;
        params.n_ubatch  = 512;
        params.n_seq_max = n_seqs;
        params.n_rs_seq  = n_draft;
        ctx.reset(llama_init_from_model(model, params));
    }

    int n_vocab() const {
        return llama_vocab_n_tokens(llama_model_get_vocab(model));
    }

    std::vector<llama_token> random(int n) {
        std::vector<llama_token> res(n);
        for (auto & token : res) {
            token = rng() % n_vocab();
        }
        return res;
    }

    // The next tokens of some sequences in one batch; the last logits of each.
    std::map<llama_seq_id, logits_t> decode(const call_t & call) {
        llama_batch batch = llama_batch_init(512, 0, 1);
        std::map<llama_seq_id, int> last;
        for (const auto & [seq, tokens] : call) {
            for (const llama_token token : tokens) {
                last[seq] = batch.n_tokens;
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
        std::map<llama_seq_id, logits_t> res;
        for (const auto & [seq, row] : last) {
            const float * logits = status == 0 ? llama_get_logits_ith(ctx.get(), row) : nullptr;
            res[seq] = logits ? logits_t(logits, logits + n_vocab()) : logits_t(n_vocab(), NAN);
        }
        llama_batch_free(batch);
        return res;
    }

    bool remove(llama_seq_id seq, int n) {
        const int left = held[seq].size() - n;
        if (!llama_memory_seq_rm(llama_get_memory(ctx.get()), seq, left, -1)) {
            return false;
        }
        held[seq].resize(left);
        return true;
    }
};

// What a sequence's logits are after these tokens, in a context that never saw others: prompt first, then one by one.
static logits_t alone(llama_model * model, llama_seq_id seq, const std::vector<llama_token> & tokens) {
    runner fresh(model);
    logits_t res = fresh.decode({{ seq, { tokens.begin(), tokens.begin() + n_prompt } }}).at(seq);
    for (size_t i = n_prompt; i < tokens.size(); ++i) {
        res = fresh.decode({{ seq, { tokens[i] } }}).at(seq);
    }
    return res;
}

static bool report(const char * name, bool ok, const char * said, double value = NAN) {
    const char * verdict = ok ? "\033[1;32mPASS\033[m" : "\033[1;31mFAIL\033[m";
    if (std::isnan(value)) {
        printf("  %-10s  %s  %s\n", name, said, verdict);
    } else {
        printf("  %-10s  NMSE %8.1e  %s\n", name, value, verdict);
    }
    return ok;
}

static bool report(const char * name, bool removed, double value) {
    return removed ? report(name, value <= nmse_eps, "", value) : report(name, false, "the engine did not remove them");
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
    if (!llama_model_is_recurrent(model.get()) && !llama_model_is_hybrid(model.get())) {
        printf("  neither recurrent nor hybrid, \033[1;33mSKIP\033[m\n");
        return true;
    }

    bool ok = true;

    bool removed = true;
    double worst = 0.0;
    for (int n = 1; n <= n_draft; ++n) {
        runner run(model.get());
        run.decode({{ 0, run.random(n_prompt) }});
        run.decode({{ 0, run.random(n_draft + 1) }});
        removed = removed && run.remove(0, n);
        const logits_t after = run.decode({{ 0, run.random(1) }}).at(0);
        worst = std::max(worst, nmse(alone(model.get(), 0, run.held[0]), after));
    }
    ok &= report("exact", removed, worst);

    {
        runner run(model.get());
        run.decode({{ 0, run.random(n_prompt) }});
        removed = true;
        for (int i = 0; i < 20; ++i) {
            const int n = 1 + run.rng() % n_draft;
            run.decode({{ 0, run.random(n + 1) }});
            removed = removed && run.remove(0, 1 + run.rng() % n);
        }
        const logits_t after = run.decode({{ 0, run.random(1) }}).at(0);
        ok &= report("rounds", removed, nmse(alone(model.get(), 0, run.held[0]), after));

        run.decode({{ 0, run.random(n_draft + 1) }});
        const bool first = run.remove(0, 2);
        ok &= report("once", first && !run.remove(0, 2), first ? "a second removal is refused" : "the first is refused");
    }

    {
        runner run(model.get());
        call_t drafts, next;
        for (llama_seq_id seq = 0; seq < n_seqs; ++seq) {
            run.decode({{ seq, run.random(n_prompt) }});
            drafts[seq] = run.random(n_draft + 1);
            next[seq]   = run.random(1);
        }
        run.decode(drafts);
        removed = true;
        for (llama_seq_id seq = 0; seq < n_seqs; ++seq) {
            removed = removed && run.remove(seq, 1 + 2*seq);
        }
        const auto after = run.decode(next);
        worst = 0.0;
        for (llama_seq_id seq = 0; seq < n_seqs; ++seq) {
            worst = std::max(worst, nmse(alone(model.get(), seq, run.held[seq]), after.at(seq)));
        }
        ok &= report("neighbours", removed, worst);
    }

    {
        runner run(model.get());
        for (llama_seq_id seq = 0; seq < n_seqs; ++seq) {
            run.decode({{ seq, run.random(n_prompt) }});
        }
        run.decode({{ 1, run.random(n_draft + 1) }, { 2, run.random(n_draft + 1) }});
        removed = run.remove(1, 3) && run.remove(2, 7);
        auto after = run.decode({{ 1, run.random(1) }, { 2, run.random(1) }});
        for (const auto & [seq, logits] : run.decode({{ 0, run.random(1) }, { 3, run.random(1) }})) {
            after[seq] = logits;
        }
        worst = 0.0;
        for (llama_seq_id seq = 0; seq < n_seqs; ++seq) {
            worst = std::max(worst, nmse(alone(model.get(), seq, run.held[seq]), after.at(seq)));
        }
        ok &= report("bystander", removed, worst);
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
