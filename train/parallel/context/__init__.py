"""Context parallelism: each rank holds some positions of every row.

api     what each rank holds, and attention that all-gathers or exchanges keys and values ("gather", "ulysses")
ring    attention whose keys and values pass from rank to rank, with partial softmax results merged ("ring")
"""
