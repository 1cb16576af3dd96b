........................................................................ [ 15%]
........................................................................ [ 31%]
..................................................F..................... [ 46%]
........................................................................ [ 62%]
........................................................................ [ 77%]
........................................................................ [ 93%]
................................                                         [100%]
=================================== FAILURES ===================================
______________________ test_every_path_on_the_map_exists _______________________

    def test_every_path_on_the_map_exists() -> None:
        wrong = [pattern for pattern in _map() if not any(PACKAGE.glob(pattern))]
>       assert not wrong, "CONTRIBUTING.md, 'Where things are': no such module; remove or rename\n" + "\n".join(wrong)
E       AssertionError: CONTRIBUTING.md, 'Where things are': no such module; remove or rename
E         cli/plugins.py
E       assert not ['cli/plugins.py']

tests/test_project.py:53: AssertionError
=========================== short test summary info ============================
FAILED tests/test_project.py::test_every_path_on_the_map_exists - AssertionEr...
1 failed, 463 passed in 61.20s (0:01:01)
Tue Nov 24 14:53:07 UTC 2026
