// What test-llama-archs needs of llama.cpp's common library to write files: so it links with the installed libraries alone.
#include "common.h"
#include "log.h"

#include <cstdlib>

static int threshold = 0;

void common_init() {}
common_log * common_log_main() { return nullptr; }
void common_log_flush(common_log *) {}
void common_log_add(common_log *, ggml_log_level, const char *, ...) {}
int  common_log_get_verbosity_thold() { return threshold; }
int  common_log_get_verbosity(ggml_log_level) { return 0; }
void common_log_set_verbosity_thold(int verbosity) { threshold = verbosity; }

// Batches are for its own tests of backends, which are not run.
common_batch::common_batch(llama_context *) { abort(); }
llama_batch_ext * common_batch::get_sub_batch(int32_t, int32_t) { abort(); }
void common_batch::clear() { abort(); }
int32_t common_batch::add(llama_token, llama_pos, llama_seq_id, bool) { abort(); }
