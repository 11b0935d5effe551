# commlens beside a CPU build of torch, with the native engine compiled: for a CI job, or to try commlens.
#
#     docker build -t commlens .
#     docker run --rm --shm-size=1g --cap-add=SYS_PTRACE commlens demo
#     docker run --rm -v "$PWD/commlens-dumps:/dumps:ro" commlens diagnose /dumps
#
# In an image of your own, three lines beside your torch are enough:
#
#     COPY commlens /opt/commlens-source
#     RUN pip install '/opt/commlens-source[stacks]' && commlens build-native -o /opt/commlens-native
#     ENV COMMLENS_NATIVE_DIR=/opt/commlens-native
FROM python:3.11-slim-bookworm AS build
ARG TORCH=2.13.0
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir "torch==$TORCH" --extra-index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml setup.py README.md LICENSE /source/
COPY src /source/src
RUN /opt/venv/bin/pip install --no-cache-dir '/source[stacks]' && /opt/venv/bin/commlens build-native -o /opt/commlens-native

FROM python:3.11-slim-bookworm
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/commlens-native /opt/commlens-native
ENV PATH=/opt/venv/bin:$PATH COMMLENS_NATIVE_DIR=/opt/commlens-native
RUN useradd --create-home commlens
USER commlens
WORKDIR /home/commlens
ENTRYPOINT ["commlens"]
CMD ["--help"]
