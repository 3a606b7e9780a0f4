from nereus.cli import main

main()
