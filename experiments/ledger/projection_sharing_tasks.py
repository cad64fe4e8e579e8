"""Claims of projection sharing (arXiv 2606.04032) on small tasks: its tables 2 and 3."""

from experiments.ledger import small_tasks
from experiments.ledger.out_of_reach import Elsewhere
from experiments.ledger.verdicts import Cases, Claim, Differs

_IMAGES = "python -m experiments.studies.images --folder=FOLDER"
_TASKS = "python -m experiments.studies.sequence_tasks --save"
_ENCODERS = "a sample of the paper's grid"


CLAIMS = (
    Claim(
        "Table 2",
        "sub is solved by all variants",
        "1.000",
        small_tasks.all_right("sub"),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "copy is solved by all variants",
        "1.000",
        small_tasks.all_right("copy"),
        _TASKS,
    ),
    Claim(
        "Figure 3; section 3.1",
        "QKV's loss falls faster than those of Q=K-V and Q=K=V (the text has Q=K=V twice)",
        "",
        small_tasks.falls_faster("qkv", ("qk_tied", "qkv_tied")),
        f"{_TASKS} --variants=qkv,qk_tied,qk_tied_plus,qkv_tied --widths=32 --lengths=32 --mix",
    ),
    Claim(
        "Table 2; section 3.1",
        "Q-K=V sorts as well as QKV, nearly",
        ".958 against .971",
        small_tasks.Alike("sort", "kv_tied", "qkv", 1.3),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "Q=K=V sorts worse than QKV",
        ".939 against .971",
        small_tasks.tells("sort", "qkv_tied", "qkv", -1),
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
        "Q-K=V reverses about as well as QKV",
        ".701 against .698",
        small_tasks.Alike("reverse", "kv_tied", "qkv", 0.3),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "Q=K-V reverses about as well as QKV",
        ".705 against .698",
        small_tasks.Alike("reverse", "qk_tied", "qkv", 0.7),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "Q=K-V sorts about as well as QKV",
        ".967 against .971",
        small_tasks.Alike("sort", "qk_tied", "qkv", 0.4),
        _TASKS,
    ),
    Claim(
        "Table 2; section 3.1",
        "(Q=K=V)+ reverses better than Q=K=V",
        ".581 against .514",
        small_tasks.tells("reverse", "qkv_tied_plus", "qkv_tied", 1),
        _TASKS,
    ),
    Claim(
        "Table 2; section 3.1",
        "(Q=K=V)+ sorts better than Q=K=V",
        ".957 against .939",
        small_tasks.tells("sort", "qkv_tied_plus", "qkv_tied", 1),
        _TASKS,
    ),
    Claim(
        "Table 2; section 3.1",
        "(Q=K-V)+ reverses better than Q=K-V",
        ".718 against .705",
        small_tasks.tells("reverse", "qk_tied_plus", "qk_tied", 1),
        _TASKS,
    ),
    Claim(
        "Table 2",
        "Q-K=V swaps about as well as QKV",
        ".590 against .588",
        small_tasks.Alike("swap", "kv_tied", "qkv", 0.2),
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
        small_tasks.Alike("swap", "qk_tied", "qkv", 0.9),
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
        "MNIST: all variants within half a point of QKV",
        ".981 .981 .982 .976 .978 .977",
        small_tasks.images_alike("mnist", 0.5),
        f"{_IMAGES} --set=mnist --save",
    ),
    Claim(
        "Table 3; section 3.2",
        "MNIST: Q=K=V slightly behind QKV",
        ".978 against .981",
        Differs(
            small_tasks.image("mnist", "qkv_tied"), -1, "+.2f", f"points of accuracy, {_ENCODERS}"
        ),
        f"{_IMAGES} --set=mnist --save",
    ),
    Claim(
        "Table 3",
        "Fashion-MNIST: Q=K-V, (Q=K-V)+ and Q-K=V within .4 points of QKV",
        ".887 .885 .884 .883",
        small_tasks.images_alike("fashion_mnist", 0.4, ("qk_tied", "qk_tied_plus", "kv_tied")),
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
    Claim(
        "Table 3",
        "Fashion-MNIST: (Q=K=V)+ behind QKV",
        ".875 against .887",
        Differs(
            small_tasks.image("fashion_mnist", "qkv_tied_plus"),
            -1,
            "+.2f",
            f"points of accuracy, {_ENCODERS}",
        ),
        f"{_IMAGES} --set=fashion_mnist --save",
    ),
    Claim(
        "section 3.2",
        "an epoch of TinyImageNet takes 40, 35 and 32 minutes in three variants of attention",
        "40, 35, 32 minutes",
        Elsewhere("their GPU and TinyImageNet's files"),
    ),
    Claim(
        "Table 3",
        "CIFAR-10 and CIFAR-100: Q=K=V is best",
        ".672 against .663; .376 against .363",
        Elsewhere("CIFAR's files"),
        f"{_IMAGES} --set=cifar10 --save",
    ),
    Claim(
        "Table 3; Figure 2",
        "TinyImageNet: Q=K=V is best",
        ".266 against .229",
        Elsewhere("TinyImageNet's files"),
        f"{_IMAGES} --set=tiny_imagenet --save",
    ),
    Claim(
        "Table 3; Figure 6; section A.3",
        "set anomaly: (Q=K-V)+ is best",
        ".966 against .942",
        Elsewhere(
            "ResNet34's features of CIFAR-100; the course's code always puts the anomaly last, "
            "which the + variants could read off",
            Differs(small_tasks.best_anomaly("last"), 1, "+.2f", "points beyond the best other"),
            "with features made up and the anomaly last",
        ),
        "python -m experiments.studies.set_anomaly --save",
    ),
    Claim(
        "section A.3",
        "predictions are equivariant: the anomaly is found whatever the order of a set",
        "",
        Cases(small_tasks.equivariant, small_tasks.equivariant_said),
        "pytest tests/experiments/ledger",
    ),
    Claim(
        "section A.3",
        "so (Q=K-V)+ gains nothing from an anomaly always last",
        "",
        Elsewhere(
            "ResNet34's features of CIFAR-100; the map of + is of places, so nothing makes it "
            "equivariant",
            Differs(
                small_tasks.drawn_less_last("qk_tied_plus"), -1, "+.2f", "points, drawn - last"
            ),
            "with features made up, a loss of accuracy when the place is drawn",
        ),
        "python -m experiments.studies.set_anomaly --save",
    ),
)
