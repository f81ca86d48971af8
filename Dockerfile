# docker build -t tesla-med . && docker run --rm -v "$PWD:/data" -w /data tesla-med adapt --help
FROM python:3.11-slim
WORKDIR /app
# The CPU build of PyTorch; leave this line out (and add --gpus all at run time) for CUDA.
RUN pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/cpu
COPY . .
RUN pip install --no-cache-dir .
ENTRYPOINT ["tesla-med"]
