"""An evaluation of coding agents on mixed-precision questions, with and without ampwise's skill, graded without an LLM.

    python -m evals --agent advisor           # a built-in agent: `advisor`, or `guide`
    python -m evals --agent 'my-agent -p'     # any command that reads a prompt on stdin and prints an answer

Scenarios and the answers that the grader is tested with are data, in ``evals/data``; docs/evals.md explains them.
"""
