"""mlx-lm's generate on a patched model.

python examples/generate.py --model org/name --prompt "Once upon a time"
python examples/generate.py             # a small random llama: what it says means nothing
"""

import argparse

import mlx.core as mx
from lora_finetune import small_model
from mlx_lm.generate import generate_step

import zmlx


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub name (default: small random weights)")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--plain", action="store_true", help="do not patch")
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error(f"'--tokens' must be at least 1 but got {arguments.tokens}.")
    if not arguments.prompt:
        parser.error("'--prompt' must have at least one character.")
    if arguments.model:
        from mlx_lm import generate, load

        model, tokenizer = load(arguments.model)[:2]
        if not arguments.plain:
            zmlx.patch(model)
        print(generate(model, tokenizer, arguments.prompt, max_tokens=arguments.tokens))
        return
    model, encode = small_model()
    if not arguments.plain:
        zmlx.patch(model)
    steps = generate_step(mx.array(encode(arguments.prompt)), model, max_tokens=arguments.tokens)
    print(" ".join(str(token) for token, _ in steps))


if __name__ == "__main__":
    main()
