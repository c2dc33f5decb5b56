"""Pairwise selections: few rows in which every two values of two factors meet."""

from itertools import combinations, product


def pairwise(**factors):
    """Greedy covering array: a list of dicts, deterministic.

    Parameters
    ----------
    **factors : sequence
        The values of each factor.

    Returns
    -------
    list of dict
        One value a factor; every pair of values of two factors is in at least one row.
    """
    names = list(factors)
    counts = {name: range(len(values)) for name, values in factors.items()}
    wanted = {((a, x), (b, y)) for a, b in combinations(names, 2) for x, y in product(counts[a], counts[b])}
    rows = []
    while wanted:
        row = dict(min(wanted))
        for name in sorted((n for n in names if n not in row), key=lambda n: -len(factors[n])):
            row[name] = max(counts[name], key=lambda x: _gain(row, name, x, names, wanted))
        wanted -= {((a, row[a]), (b, row[b])) for a, b in combinations(names, 2)}
        rows.append({name: factors[name][row[name]] for name in names})
    return rows


def _gain(row, name, value, names, wanted):
    """How many pairs still wanted the value would meet in the row; later values win ties for variety."""
    pairs = (tuple(sorted([(name, value), item], key=lambda p: names.index(p[0]))) for item in row.items())
    return sum(pair in wanted for pair in pairs), value
