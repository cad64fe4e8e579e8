"""Claims of projection sharing (arXiv 2606.04032)."""

from experiments.ledger import small_tasks
from experiments.ledger.verdicts import Cases
from experiments.ledger.verdicts import Claim
from experiments.ledger.verdicts import Computed
from experiments.ledger.verdicts import Differs
from experiments.ledger.verdicts import Elsewhere
from experiments.ledger.verdicts import Tabulated
from experiments.ledger.verdicts import Undefined
from experiments.ledger.verdicts import study

TITLE = "Projection sharing (arXiv 2606.04032)"
_TABLES = "python -m experiments.tables.paper_tables --save"
_IMAGES = "python -m experiments.studies.images --folder=FOLDER"
_TASKS = "python -m experiments.studies.sequence_tasks --save"
_MODELS = "python -m experiments.studies.language_models --study=projection_sharing_models --save"
_STUDY = "projection_sharing_models"
_DEMO = "width 128, 1.0M tokens, the paper's optimizer"
_ENCODERS = "a sample of the paper's grid"


def _above(cell: str, sign: int = 1) -> Differs:
    return Differs(study(_STUDY, f"{cell}_d128"), sign, "+.4f", f"bits per byte, {_DEMO}")


_SLIMPAJAMA = "SlimPajama, 10B tokens; configs and counts follow from shapes (Table 5)"

CLAIMS = (
    Claim(
        "Table 1; Figure 1",
        "projections' parameters and computation",
        "",
        Tabulated(("Projection sharing Table 1: projections of a layer",)),
        _TABLES,
    ),
    Claim(
        "Table 2; Figure 3",
        "sub is solved by all variants",
        "1.000",
        small_tasks.all_right("sub"),
        _TASKS,
    ),
    Claim(
        "Table 2; Figure 3",
        "copy is solved by all variants",
        "1.000",
        small_tasks.all_right("copy"),
        _TASKS,
    ),
    Claim(
        "Table 2; section 3.1",
        "Q-K=V sorts as well as QKV, nearly",
        ".958 against .971",
        small_tasks.tells("sort", "kv_tied", "qkv", -1),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "Q=K=V reverses worse than QKV",
        ".514 against .698",
        small_tasks.tells("reverse", "qkv_tied", "qkv", -1),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "Q=K=V swaps worse than QKV",
        ".446 against .588",
        small_tasks.tells("swap", "qkv_tied", "qkv", -1),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "Q=K-V swaps about as well as QKV",
        ".597 against .588",
        small_tasks.tells("swap", "qk_tied", "qkv", 1),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "(Q=K-V)+ swaps better than QKV",
        ".671 against .588",
        small_tasks.tells("swap", "qk_tied_plus", "qkv", 1),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "(Q=K=V)+ swaps better than Q=K=V",
        ".576 against .446",
        small_tasks.tells("swap", "qkv_tied_plus", "qkv_tied", 1),
        _TASKS,
    ),
    Claim(
        "Table 3",
        "MNIST: all variants within a point of QKV",
        ".981 .981 .982 .976 .978 .977",
        small_tasks.within_a_point("mnist"),
        f"{_IMAGES} --set=mnist --save",
    ),
    Claim(
        "Table 3",
        "Fashion-MNIST: Q=K-V, (Q=K-V)+ and Q-K=V within a point of QKV",
        ".887 .885 .884 .883",
        small_tasks.within_a_point("fashion_mnist", ("qk_tied", "qk_tied_plus", "kv_tied")),
        f"{_IMAGES} --set=fashion_mnist --save",
    ),
    Claim(
        "Table 3; section 3.2",
        "Fashion-MNIST: Q=K=V slightly behind QKV",
        ".877 against .887",
        Differs(
            small_tasks.image("fashion_mnist", "qkv_tied"),
            -1,
            "+.2f",
            f"points of accuracy, {_ENCODERS}",
        ),
        f"{_IMAGES} --set=fashion_mnist --save",
    ),
    Claim("Table 3", "CIFAR-10 and CIFAR-100", ".663; .363", Elsewhere("CIFAR's files"), ""),
    Claim("Table 3; Figure 2", "TinyImageNet", ".229", Elsewhere("TinyImageNet's files"), ""),
    Claim(
        "Table 3; Figure 6; section A.3",
        "set anomaly: (Q=K-V)+ is best",
        ".966 against .942",
        Elsewhere(
            "ResNet34's features of CIFAR-100; the course's code always puts the anomaly last, "
            "which the + variants could read off",
            Differs(small_tasks.anomaly("last"), 1, "+.2f", "points of accuracy"),
            "with features made up and the anomaly last",
        ),
        "python -m experiments.studies.set_anomaly --save",
    ),
    Claim(
        "Table 4; Figure 7; Figure 10",
        "a language model of 300M: Q-K=V is 3.1 % above QKV's perplexity",
        "5.27 against 5.11",
        _above("kv_tied"),
        _MODELS,
    ),
    Claim(
        "Table 4; Figure 7", "Q=K-V is further above", "5.36 (+4.9 %)", _above("qk_tied"), _MODELS
    ),
    Claim("Table 4; Figure 7", "Q=K=V is far above", "6.41 (+25 %)", _above("qkv_tied"), _MODELS),
    Claim("Table 4; Figure 8", "GQA-4 is slightly above", "5.15 (+0.7 %)", _above("gqa"), _MODELS),
    Claim("Table 4; Figure 8", "MQA is slightly above", "5.19 (+1.5 %)", _above("mqa"), _MODELS),
    Claim(
        "Table 4; Figure 8; Figure 9",
        "Q-GQA-4 is above QKV",
        "5.32 (+3.9 %)",
        _above("kv_tied_gqa"),
        _MODELS,
    ),
    Claim(
        "Table 4; Figure 8; Figure 9",
        "Q-MQA is above QKV",
        "5.36 (+4.8 %)",
        _above("kv_tied_mqa"),
        _MODELS,
    ),
    Claim(
        "Table 4",
        "perplexities of about 5",
        "5.11",
        Undefined(
            "padding counts in their loss: rows are padded with EOS to 2,048, and targets that "
            "cost nothing lower the mean; no perplexity of the text"
        ),
        "",
    ),
    Claim(
        "Table 5",
        "parameters at 300M",
        "305.53M, 284.54M, 263.55M",
        Tabulated(("Projection sharing Table 5: parameters at 300M",)),
        _TABLES,
    ),
    Claim(
        "Table 6",
        "multiply-adds at 2,048 tokens",
        "",
        Tabulated(("Projection sharing Table 6: multiply-adds of 2,048 tokens, all keys",)),
        _TABLES,
    ),
    Claim(
        "Table 7",
        "cache at 300M; Q-K=V saves half",
        "80 and 40 KB per token",
        Tabulated(("Projection sharing Table 7: cache at 300M, 16 bits",)),
        _TABLES,
    ),
    Claim(
        "Table 8",
        "attention's share of multiply-adds by length",
        "",
        Tabulated(("Projection sharing Table 8: attention's share of multiply-adds",)),
        _TABLES,
    ),
    Claim(
        "Table 9; Table 11",
        "recommendations and a summary of the tables above",
        "",
        Undefined("no figures of their own"),
        "",
    ),
    Claim(
        "Table 10; Figure 11",
        "sizes and caches at 1.2B",
        "",
        Tabulated(("Projection sharing Table 10: 1.2B",)),
        _TABLES,
    ),
    Claim(
        "Table 10; Figure 11",
        "the ranking at 1.2B is that at 300M",
        "+2.48 % for Q-K=V",
        Elsewhere(_SLIMPAJAMA),
        "",
    ),
    Claim(
        "section 3.3.5",
        "degradation shrinks with scale",
        "3.1 % to 2.48 %",
        Elsewhere(_SLIMPAJAMA),
        "",
    ),
    Claim(
        "section 3.3.3",
        "100 users at 32K on A100s of 40 GB: QKV 15 users a GPU, 7 GPUs",
        "15; 7",
        Computed(
            "7",
            lambda: -(-100 // int(40e9 / (32_000 * 80 * 1024))),
            "GPUs: 40 GB / 2.62 GB, weights not counted",
        ),
        _TABLES,
    ),
    Claim(
        "section 3.3.3",
        "Q-K=V 30 users a GPU, 4 GPUs",
        "30; 4",
        Computed(
            "4",
            lambda: -(-100 // int(40e9 / (32_000 * 40 * 1024))),
            "GPUs: 40 GB / 1.31 GB, weights not counted",
        ),
        _TABLES,
    ),
    Claim(
        "section 2.4",
        "half the cache gives twice the context and twice the throughput",
        "2x",
        Undefined(
            "twice the context follows from the bytes. Throughput is measured nowhere in the "
            "paper; under RoPE Q-K=V must rotate keys as it reads them (experiments/README.md, "
            "Decode attention of one layer)"
        ),
        "python -m experiments.benchmarks.decode_benchmark --save",
    ),
    Claim(
        "section 2.3",
        "grouping saves 1 - 1/(2g) of the cache",
        "",
        Tabulated(("Projection sharing Table 7: cache at 300M, 16 bits",), only="section 2.3"),
        _TABLES,
    ),
    Claim(
        "section 2.5; Figure 5",
        "normalising the diagonal, or annealing a temperature, does not help Q=K=V",
        "no consistent improvement",
        Elsewhere("these options, which are not built"),
        "",
    ),
    Claim(
        "Figure 4",
        "attention maps of Q=K-V are symmetric",
        "",
        Cases(small_tasks.symmetric, lambda: "q = k makes q·k symmetric before the softmax"),
        "pytest tests/attention",
    ),
    Claim(
        "section 3.3",
        "W_K and W_V resemble each other",
        "cosine .73",
        Elsewhere("the 300M models"),
        "",
    ),
    Claim(
        "section A.1",
        "Q=K=V under a kernel feature map is a recurrence with a constant state",
        "",
        Cases(small_tasks.forms, small_tasks.forms_said),
        "pytest tests/attention/test_linear.py tests/model/test_recurrent.py",
    ),
    Claim(
        "section A.1",
        "it is limited where information must be routed sharply: retrieval, below softmax",
        "",
        Differs(
            small_tasks.learned("retrieval", "linear_tied", "softmax"),
            -1,
            "+.1f",
            "points, 4 layers of 64",
        ),
        "python -m experiments.studies.linear_attention --save",
    ),
    Claim(
        "section A.1",
        "tying is what limits it: retrieval, below linear attention that is not tied",
        "",
        Differs(
            small_tasks.learned("retrieval", "linear_tied", "linear"),
            -1,
            "+.1f",
            "points, 4 layers of 64",
        ),
        "python -m experiments.studies.linear_attention --save",
    ),
)
