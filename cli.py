"""The command line of the engine: arguments in, text or JSON lines out, figures on stderr."""

import argparse
import inspect
import json
import os
import sys
import time
from dataclasses import asdict, fields

from engine import DEFAULT_MODEL, DTYPES, LLM, RequestOutput
from sampler import SamplingParams, kind

EXAMPLES = """examples:
  python engine.py --prompt "Once upon a time"
  python engine.py --chat --system "Answer in one sentence." --prompt "Why is the sky blue?"
  python engine.py --model Qwen/Qwen3-0.6B --chat --no-think --prompt "Hello" --temperature 0.7 --seed 1
  cat story.txt | python engine.py --prompt -
  python engine.py --prompt "Once upon a time" --receipt answer.jsonl && python engine.py --verify answer.jsonl"""
METAVARS = {int: "N", float: "X", str: "TEXT"}


def build_parser() -> argparse.ArgumentParser:
    about = "samebits: complete prompts with an LLM whose answers never depend on what else it is serving."
    parser = argparse.ArgumentParser(prog="engine.py", description=about, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeat for more, - reads all of stdin")
    add("--prompt-file", metavar="FILE", help="one prompt a line; - reads stdin")
    add("--chat", action="store_true", help="send each prompt as a user's message through the chat template")
    add("--system", metavar="TEXT", help="system message (with --chat)")
    add("--no-think", action="store_true", help="ask a thinking model (Qwen3) to answer at once (with --chat)")
    add = parser.add_argument_group("model").add_argument
    add("--model", default=DEFAULT_MODEL, help="checkpoint folder or Hub id (default: %(default)s)")
    add("--revision", help="branch, tag or commit of a Hub id")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: the checkpoint's, on CPU float32")
    add("--load-format", choices=["auto", "dummy"], default="auto", help="dummy: random weights, to measure speed")
    add = parser.add_argument_group("sampling", "An answer is a function of prompt, model and these.").add_argument
    for parameter in fields(SamplingParams):
        if "help" in parameter.metadata:
            of, name, text = kind(parameter), parameter.name.replace("_", "-"), parameter.metadata["help"]
            takes = {"action": "store_true"} if of is bool else {"type": of, "metavar": METAVARS[of]}
            if parameter.default == ():
                takes |= {"action": "extend", "nargs": "+"}
            add("--" + name, default=argparse.SUPPRESS, help=text, **takes)
    parser.set_defaults(max_tokens=512)  # the library's is the room left
    add = parser.add_argument_group("engine", "None but --tp-style changes an answer, except its cut-off.").add_argument
    add("--schedule", choices=["auto", "reference"], default="auto", help="reference: one fixed kernel configuration")
    add("--max-model-len", type=int, metavar="N", help="longest prompt + output (default: what model and cache allow)")
    add("--max-num-seqs", type=int, metavar="N", help="most sequences in a step (default: 1024 on a big GPU, else 256)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step (default: 8192, on CPU 512)")
    add("--gpu-memory-utilization", type=float, default=0.85, metavar="F", help="share of it (default: %(default)s)")
    add("--num-gpu-blocks-override", type=int, metavar="N", help="size of the KV cache in blocks of 64 tokens")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs to share, of this host or by torchrun")
    add("--tp-style", choices=["column", "row"], default="column", help="column: the same bits on any number of GPUs; "
        "row: half the exchanges, and bits that are each number's own")
    add("--expert-parallel", action="store_true", help="GPUs share experts out, not the columns of each; the same bits")
    add("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object a completion: text, ids, logprobs (only shown here)")
    add("--receipt", metavar="FILE", help="write one JSON object a completion, with which --verify can check it")
    add("--trace", action="store_true", help="with --receipt: add a digest of every op's output, layer by layer")
    add = parser.add_argument_group("proof", "Instead of a prompt.").add_mutually_exclusive_group().add_argument
    add("--fingerprint", action="store_true", help="print the name of everything that may change bits, and its parts")
    add("--verify", metavar="FILE", help="replay every receipt of a file in one prefill each; exit code 1 if one fails")
    add("--selfcheck", action="store_true", help="compare schedules, and ways of serving this model, bit for bit")
    return parser


def chosen(args: argparse.Namespace, constructor) -> dict:
    """Those of the arguments that a constructor knows, by name."""
    return {name: value for name, value in vars(args).items() if name in inspect.signature(constructor).parameters}


def print_json(llm: LLM, output: RequestOutput) -> None:
    for out in output.outputs:
        record = {"prompt": output.prompt, **asdict(out), "fingerprint": llm.fingerprint, "timings": output.timings,
                  "params": asdict(output.params), "prompt_logprobs": output.prompt_logprobs}
        hidden = {"delta"} | {name for name in ("top_logprobs", "prompt_logprobs") if record[name] is None}  # not asked
        print(json.dumps({name: record[name] for name in record if name not in hidden}, ensure_ascii=False), flush=True)
    if output.error:
        print(json.dumps({"prompt": output.prompt, "error": output.error}, ensure_ascii=False), flush=True)


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    options = chosen(args, LLM) | {"progress": sys.stderr.isatty()}
    if args.fingerprint or args.verify or args.selfcheck:
        from tools.proof import prove  # no other run needs it
        return prove(args, options)
    prompts = [sys.stdin.read() if text == "-" else text for text in args.prompt]  # what is piped in is one prompt
    if args.prompt_file:
        try:
            with sys.stdin if args.prompt_file == "-" else open(args.prompt_file, encoding="utf-8") as lines:
                prompts += [line.rstrip("\r\n") for line in lines if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read --prompt-file {args.prompt_file}: {error}") from error
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file FILE (see --help)")
    if args.receipt:
        open(args.receipt, "a").close()  # fails now, not after the work
    llm = LLM(**options)
    own = {"logprobs": 0} if args.json or args.receipt else {}  # the tokens' own logprobs, asked for or not
    params = SamplingParams(**own | chosen(args, SamplingParams))
    inputs, options = prompts, {"add_special_tokens": not args.chat}
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        thinking = {"enable_thinking": False} if args.no_think else {}
        inputs = [llm.apply_chat_template(system + [{"role": "user", "content": text}], **thinking) for text in prompts]
    loaded = time.perf_counter()
    if len(prompts) == 1 and params.n == 1 and not args.json:
        for output in llm.stream(inputs[0], params, **options):
            print(output.outputs[0].delta, end="", flush=True)
        print(flush=True)
        outputs = [output]
    else:
        outputs = llm.generate(inputs, params, progress=sys.stderr.isatty() and len(prompts) > 1, **options)
    for i, output in enumerate(outputs):
        output.prompt = prompts[i]  # with --chat, not the template's text
        if args.json:
            print_json(llm, output)
        elif len(outputs) > 1 or params.n > 1:
            for out in output.outputs:
                number = f" [{out.index}]" if params.n > 1 else ""
                print(f"--- {output.prompt!r}{number}\n{out.text}")
        if output.error:
            print(f"error: prompt {i}: {output.error}", file=sys.stderr)
    took = time.perf_counter() - loaded
    if args.receipt:
        made = [llm.receipt(o, c.index, args.trace) for o in outputs for c in o.outputs if c.finish_reason != "error"]
        with open(args.receipt, "w") as file:
            file.writelines(json.dumps(receipt) + "\n" for receipt in made)
    count = sum(len(out.token_ids) for output in outputs for out in output.outputs)
    ranks = f" x {llm.ranks.size} by {llm.model.exchange.name}" if llm.model.exchange else ""
    print(f"{count} tokens in {took:.2f} s: {count / took:.1f} tokens/s on {llm.device.type}{ranks} "
          f"(start {loaded - start:.1f} s)", file=sys.stderr)
    return 1 if any(output.error for output in outputs) else 0


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, 1 (a request or a check failed), 2 (bad arguments, model or environment), 130 (interrupted)."""
    args = (parser := build_parser()).parse_args(argv)
    if (args.system or args.no_think) and not args.chat:
        parser.error("--system and --no-think need --chat")
    if "-" in (*args.prompt, args.prompt_file) and args.tensor_parallel_size > 1 and "LOCAL_WORLD_SIZE" in os.environ:
        parser.error("torchrun's processes share one stdin: give the prompt as text, or in a file")
    if args.trace and (not args.receipt or args.tensor_parallel_size > 1):
        parser.error("--trace needs --receipt and --tensor-parallel-size 1")
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
