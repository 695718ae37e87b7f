"""What is tried with `--attn-suite=onnx` alone: the cases that the package `onnx` carries."""
