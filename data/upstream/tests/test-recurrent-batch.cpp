// Several sequences in one batch must equal each sequence alone, whoever their neighbours are.
//
// For recurrent and hybrid models; random weights will do. Three tests, each against the same tokens in a context of
// their own (NMSE of the last logits):
//
//   packed     prompts of all sequences in one batch
//   neighbours the same batch with other prompts beside sequence 0, which must not change
//   bystander  sequences 1 and 2 step twice without the others; then sequence 3 steps

#include "llama.h"
#include "llama-cpp.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

static constexpr int    n_seqs   = 4;
static constexpr int    n_prompt = 48;
static constexpr double nmse_eps = 1e-4; // as in test-recurrent-state-rollback

using call_t   = std::vector<std::pair<llama_seq_id, int>>; // sequence, number of its next tokens
using logits_t = std::vector<float>;

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

// Run calls from an empty context; the last logits of every sequence. `other`: the neighbours of sequence 0 read other tokens.
static std::map<llama_seq_id, logits_t> run(llama_model * model, const std::vector<call_t> & calls, bool other = false) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    llama_context_params params = llama_context_default_params();
    params.n_ctx     = 1024;
    params.n_batch   = 512;
    params.n_ubatch  = 512;
    params.n_seq_max = n_seqs;

    llama_context_ptr ctx{llama_init_from_model(model, params)};
    if (!ctx) {
        return {};
    }

    std::map<llama_seq_id, logits_t>  res;
    std::map<llama_seq_id, llama_pos> past;

    for (const auto & call : calls) {
        llama_batch batch = llama_batch_init(512, 0, 1);
        std::map<llama_seq_id, int> last;
        for (const auto & [seq, count] : call) {
            for (int i = 0; i < count; ++i) {
                const llama_pos pos   = past[seq]++;
                const int       shift = other && seq > 0 ? 13 : 0;
                last[seq] = batch.n_tokens;
                batch.token   [batch.n_tokens]    = (7*pos + 31*seq + shift + 5) % n_vocab;
                batch.pos     [batch.n_tokens]    = pos;
                batch.n_seq_id[batch.n_tokens]    = 1;
                batch.seq_id  [batch.n_tokens][0] = seq;
                batch.logits  [batch.n_tokens]    = i == count - 1;
                batch.n_tokens++;
            }
        }
        const int32_t status = llama_decode(ctx.get(), batch);
        for (const auto & [seq, row] : last) {
            const float * logits = status == 0 ? llama_get_logits_ith(ctx.get(), row) : nullptr;
            res[seq] = logits ? logits_t(logits, logits + n_vocab) : logits_t(n_vocab, NAN);
        }
        llama_batch_free(batch);
    }

    return res;
}

static bool report(const char * name, double value) {
    const bool ok = value <= nmse_eps;
    printf("  %-10s  NMSE %8.1e  %s\n", name, value, ok ? "\033[1;32mPASS\033[m" : "\033[1;31mFAIL\033[m");
    return ok;
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

    call_t packed;
    std::vector<call_t> each;
    for (llama_seq_id seq = 0; seq < n_seqs; ++seq) {
        packed.push_back({ seq, n_prompt });
        each.push_back({{ seq, n_prompt }});
    }

    bool ok = true;

    const auto together = run(model.get(), { packed });
    double worst = 0.0;
    for (llama_seq_id seq = 0; seq < n_seqs; ++seq) {
        worst = std::max(worst, nmse(run(model.get(), { each[seq] }).at(seq), together.at(seq)));
    }
    ok &= report("packed", worst);
    ok &= report("neighbours", nmse(together.at(0), run(model.get(), { packed }, true).at(0)));

    std::vector<call_t> steps = each;
    steps.push_back({{ 1, 1 }, { 2, 1 }});
    steps.push_back({{ 1, 1 }, { 2, 1 }});
    steps.push_back({{ 3, 1 }});
    const auto stepped = run(model.get(), steps);
    worst = 0.0;
    for (llama_seq_id seq = 1; seq < n_seqs; ++seq) {
        std::vector<call_t> alone = { each[seq] };
        for (int i = 0; i < (seq == 3 ? 1 : 2); ++i) {
            alone.push_back({{ seq, 1 }});
        }
        worst = std::max(worst, nmse(run(model.get(), alone).at(seq), stepped.at(seq)));
    }
    ok &= report("bystander", worst);

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
