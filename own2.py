from edit import File
f = File("tasks/test_own_task.py")
# --- data
f.sub('''def small(data: Datasets | None = None, **changes: Any) -> DatasetTask:
    data = data or Datasets(Table(), Table(20), model=Scores)
    return DatasetTask(data, options(task="mine:task", **changes))
''', '''def datasets(train: Any = None, test: Any = None, **fields: Any) -> Datasets:
    train = Table() if train is None else train
    return Datasets(train, train if test is None else test, **{"model": Scores, **fields})


def small(data: Datasets | None = None, **changes: Any) -> DatasetTask:
    return DatasetTask(data or datasets(test=Table(20)), options(task="mine:task", **changes))
''')
f.sub('''    one, other = (small(Datasets(d, d, model=Scores)) for d in (data, Slow()))
''', '''    one, other = (small(datasets(d)) for d in (data, Slow()))
''')
f.sub('''    data = Datasets(Table(), Table(20), valid=Table(30), model=Scores)
    alone, task''', '''    data = datasets(test=Table(20), valid=Table(30))
    alone, task''')
f.sub('''        task = small(Datasets(Table(), data, model=Scores, forward=forward, collate=collate))
''', '''        task = small(datasets(test=data, forward=forward, collate=collate))
''')
f.sub('''        small(Datasets(Table(), Table(), valid=Table(), model=Scores), validation_ratio=0.2)
''', '''        small(datasets(valid=Table()), validation_ratio=0.2)
''')
f.sub("small(Datasets(data, data, model=Scores, labels=given), **split)", "small(datasets(data, labels=given), **split)")
f.sub("small(Datasets(data, data, model=Scores, labels=labels), **split)", "small(datasets(data, labels=labels), **split)")
f.sub("small(Datasets(real, real, model=Scores)).label_counts()", "small(datasets(real)).label_counts()")
f.sub('''    task = small(Datasets(Table(), Table(), model=Scores, columns=columns), column="client")
    assert task''', '''    task = small(datasets(columns=columns), column="client")
    assert task''')
f.sub('''    task = small(Datasets(table, table, model=Scores), column="targets", batch_size=1)
''', '''    task = small(datasets(table), column="targets", batch_size=1)
''')
f.sub('''        small(Datasets(Table(), Table(), model=Scores, columns=columns), column="client", **changes)
''', '''        small(datasets(columns=columns), column="client", **changes)
''')
f.swap("measured", '''
def measured(inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """The default metrics of a model that returns its inputs."""
    loss, found = small().loss(nn.Identity(), (inputs, targets))
    assert not any(value.requires_grad for value in found.values())
    assert loss.item() == pytest.approx(next(iter(found.values())).item())
    return {name: value.item() for name, value in found.items()}
''')
f.sub('''    data = Datasets(Table(), Table(), model=Scores)
    scores = torch.randn(5, 3, 7, requires_grad=True)
''', '''    scores = torch.randn(5, 3, 7, requires_grad=True)
''')
f.sub("found = measured(data, scores, targets)", "found = measured(scores, targets)")
f.sub('''    data = Datasets(Table(), Table(), model=Scores)
    scores, targets = torch.randn(5, 3, 7''', '''    scores, targets = torch.randn(5, 3, 7''')
f.sub("    measured(data, scores, targets)\n", "    measured(scores, targets)\n", 2)
f.sub('''    data = Datasets(Table(), Table(), model=Scores)
    for shape''', '''    for shape''')
f.sub("found = measured(data, outputs, targets)", "found = measured(outputs, targets)")
f.sub("sums = small(Datasets(data, data, model=Scores), batch_size=2).evaluate(nn.Identity())", "sums = small(datasets(data), batch_size=2).evaluate(nn.Identity())")
f.sub('''    data = Datasets(
        Table(),
        Table(20),
        model=Scores,
        collate''', '''    data = datasets(
        collate''')
f.sub('''    data = Datasets(Table(), Table(), model=Scores, main_metric="auc", larger_is_better=True)
    with pytest.raises(ValueError, match=r"^main_metric=auc: use .*r2"):
        tasks.main_metric(small(data), ["r2"])
''', '''    auc = small(datasets(main_metric="auc", larger_is_better=True))
    with pytest.raises(ValueError, match=r"^main_metric=auc: use .*r2"):
        tasks.main_metric(auc, ["r2"])
''')
f.sub('''    fields: dict[str, Any] = {"train": Table(), "test": Table(), "model": Scores} | changes
    with pytest.raises(ValueError, match=words):
        small(Datasets(**fields))
''', '''    with pytest.raises(ValueError, match=words):
        small(datasets(**changes))
''')
f.drop("test_groups_are_balanced", "test_a_column_may_be_an_attribute_of_the_data")
f.swap("test_groups_of_a_column_stay_together", '''
@pytest.mark.parametrize("n_groups", [4, 5, 40])
def test_groups_of_a_column_stay_together(n_groups: int) -> None:
    """Balanced: 8 + 3, 7 + 4 and 6 + 5 samples."""
    column = [f"client {i % n_groups}" for i in range(N)]
    given = options(column="client", batch_size=4)
    first, again, other = (
        Shards(torch.zeros(N), replace(given, seed=seed), column).indices for seed in (1, 1, 2)
    )
    held = [first(worker, 3).tolist() for worker in range(4)]
    assert sorted(itertools.chain(*held)) == list(range(N))
    groups = [{column[sample] for sample in of_worker} for of_worker in held]
    assert sum(map(len, groups)) == n_groups
    sizes = list(map(len, held))
    assert max(sizes) - min(sizes) <= -(-N // n_groups)  # the largest group
    assert sorted(first(0, 4).tolist()) == sorted(held[0]) != first(0, 4).tolist()
    assert again(0, 3).tolist() == held[0]
    assert n_groups < 40 or set(other(0, 3).tolist()) != set(held[0])
    unequal = [group for group in range(3, 9) for _ in range(group)]
    _, bounds = by_group(unequal, 3, generator(n_groups, "test"))
    assert np.diff(bounds).tolist() == [11, 11, 11]
''')
f.sub('''    assert {len(shard(task, worker)) for worker in range(4)} == {10, 16}
''', '''    assert {len(shard(task, worker)) for worker in range(4)} == {10, 16}
    table = Table()  # a column may be an attribute of the data
    task = small(datasets(table), column="targets", batch_size=1)
    labels = [{table.targets[n] for n in shard(task, w)} for w in range(4)]
    assert [len(of_worker) for of_worker in labels] == [1, 1, 1, 1]
''')
f.sub('''    used = {
        number for worker in range(4) for epoch in range(9) for number in shard(task, worker, epoch)
    }
    assert len(used) == 82
''', '''    used = [number for w in range(4) for epoch in range(9) for number in shard(task, w, epoch)]
    assert len(set(used)) == 82
''')
f.swap("test_an_error_at_import_is_the_users", '''
def test_an_error_at_import_is_the_users(module: Callable[..., str]) -> None:
    for source, error in (
        ("import absent_library", ModuleNotFoundError),
        ("x = (", SyntaxError),
        ("float(chr(97))", UserCodeError),  # a ValueError
    ):
        with pytest.raises(error):
            train.main([*TINY, f"task={module(source)}:task"])
''')
f.sub('''def test_a_wrong_name_lists_a_few_public_names() -> None:
    with pytest.raises(ValueError, match="os:nofn") as caught:
        user_functions.find("task", "os:nofn")
    listed = str(caught.value).partition("; use ")[2].split(" or ")
    assert 0 < len(listed) <= 5
    assert [name for name in listed if name.startswith("_")] == []


''', '')
f.sub('''    package = module("class Tasks''', '''    with pytest.raises(ValueError, match="os:nofn") as caught:
        user_functions.find("task", "os:nofn")
    listed = str(caught.value).partition("; use ")[2].split(" or ")  # a few public names
    assert 0 < len(listed) <= 5
    assert [name for name in listed if name.startswith("_")] == []
    package = module("class Tasks''')
f.done()
