# syntax=docker/dockerfile:1
# A vLLM server for one policy. mgrpo is not in it: its bounds and vLLM's exclude each other, they speak over HTTP.
#
#   docker build --file infra/deploy/images/vllm.Dockerfile --tag mgrpo-vllm:0.1.0 infra/deploy/images
#   docker run --gpus device=2 --shm-size 8g --publish 127.0.0.1:8000:8000 --volume /path/to/policy:/policy:ro \
#       --env VLLM_API_KEY mgrpo-vllm:0.1.0
#
# The routes that change weights (VLLM_SERVER_DEV_MODE=1) obey whoever reaches the port, with or without a key. They are
# off unless you set it; then keep the port on an address that only the iteration's host reaches.
FROM vllm/vllm-openai:v0.32.0

RUN useradd --uid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin mgrpo \
    && install --directory --owner mgrpo --group mgrpo /data

# Compiled kernels and tokenizers are kept below the home folder. Nothing is fetched: a policy is a folder.
ENV HOME=/data \
    DO_NOT_TRACK=1 \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1
WORKDIR /data
USER 10001:10001
EXPOSE 8000

# Loading weights and capturing graphs takes minutes.
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=4 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

# Raw log-probabilities: those of the policy itself, before temperature and penalties, which an update compares with.
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server", "--host=0.0.0.0", "--port=8000"]
CMD ["--model=/policy", "--served-model-name=policy", "--logprobs-mode=processed_logprobs", "--enable-scale-out"]
