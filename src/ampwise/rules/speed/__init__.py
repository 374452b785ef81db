"""Why a precision is not faster, and what makes a comparison doubtful."""
