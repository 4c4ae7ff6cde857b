# For CMAKE_PROJECT_INCLUDE: half of llama.cpp is not used here, and on a Mac the bindings turn Metal on whatever they are told.
set(LLAMA_BUILD_COMMON OFF)
if(DEFINED GGML_METAL)
  set(GGML_METAL "${GGML_METAL}")
endif()
